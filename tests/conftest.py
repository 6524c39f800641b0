"""Summary of the tests that ran on machines: on a real kernel, or in namespaces of this computer's kernel."""

from __future__ import annotations

import os
import signal
from collections import Counter

import pytest

# A shell without job control starts background commands with SIGINT ignored, and what tests start inherits that.
# bash cannot trap it then, so that tests of Ctrl-C would hang.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

#: Markers and their headings in the summary.
MACHINES = {
    "real_kernel": "on a real kernel, in a virtual machine",
    "namespaces": "in namespaces of this computer's kernel",
}


def pytest_configure() -> None:
    """Workers of pytest-xdist set the width of their terminal, and commands would wrap their lines at it."""
    os.environ.pop("COLUMNS", None)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [report for name in ("passed", "failed") for report in terminalreporter.stats.get(name, ())]
    for marker, heading in MACHINES.items():
        ran = [report for report in reports if report.when == "call" and marker in report.keywords]
        if not ran:
            continue
        terminalreporter.section(f"tests {heading}: {len(ran)}", sep="-")
        names = Counter(report.nodeid.partition("[")[0] for report in ran)
        machines = {str(value) for report in ran for key, value in report.user_properties if key == "machine"}
        for line in sorted(machines):
            terminalreporter.line(line)
        for name, count in sorted(names.items()):
            terminalreporter.line(f"{name} ({count} cases)" if count > 1 else name)
