"""Names of listener processes: a successor on the same host knows that a process has ended."""

from __future__ import annotations

import os
import subprocess
import sys

from remuda.wiring.demand import has_ended, process_name


def test_process_of_this_host_has_ended_when_it_does_not_run_any_more() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        owner = f"{process_name(process.pid)}-051f963a2220edd9"
        assert not has_ended(owner)
    assert has_ended(owner)


def test_reused_process_id_is_another_process() -> None:
    name, _, _ = process_name(os.getpid()).rpartition(".")
    assert has_ended(f"{name}.1-051f963a2220edd9")
    assert not has_ended(f"{process_name(os.getpid())}-051f963a2220edd9")


def test_nothing_is_known_of_other_hosts_and_namespaces() -> None:
    host, namespace, _ = process_name(os.getpid()).split("/")
    process = f"{2**22 + 1}.1"
    assert has_ended(f"{host}/{namespace}/{process}-1")
    for other in (f"other/{namespace}/{process}-1", f"{host}/7/{process}-1", "", "vm/12209-051f963a2220edd9", "x-y"):
        assert not has_ended(other)
