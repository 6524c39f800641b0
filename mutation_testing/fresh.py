"""Run of tests in a process whose code was changed at import by `simulation.mutation`.

Prints the tests that failed as JSON. Tests that cannot be collected count as failed.
"""

from __future__ import annotations

import json
import sys

import pytest

from mutation_testing.recording import PYTEST_ARGUMENTS


class Failures:
    def __init__(self) -> None:
        self.names: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.names.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.names.append("import")


def main(names: list[str]) -> None:
    failures = Failures()
    code = pytest.main([*PYTEST_ARGUMENTS, "-x", *names], plugins=[failures])
    if code and not failures.names:
        failures.names.append(f"pytest: {pytest.ExitCode(code).name}")
    sys.stdout.write(f"RESULT {json.dumps(failures.names)}")


if __name__ == "__main__":
    main(sys.argv[1:])
