"""The short form of `make demo-aws`: its checks pass, and it leaves nothing, even if interrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.aws_demo import SELF_TERMINATED, leftovers
from tests.support.namespace_machine.machine import unsupported_reason

#: Seconds for the demo. Generous: only a broken demo reaches it.
LIMIT_S = 600
pytestmark = [
    pytest.mark.skipif(bool(unsupported_reason()), reason=unsupported_reason()),
    pytest.mark.timeout(LIMIT_S + 60),
]
ROOT = Path(__file__).parents[2]
DEMO = (sys.executable, "-m", "tests.support.aws_demo", "--short", "--json")


def environment(folder: Path) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "TMPDIR": str(folder), "HOME": str(folder)}


def test_demo_passes_its_checks_and_leaves_nothing(tmp_path: Path):
    done = subprocess.run(DEMO, capture_output=True, text=True, timeout=LIMIT_S, check=False, env=environment(tmp_path))
    assert done.returncode == 0, done.stderr[-10_000:]
    report = json.loads(done.stdout)
    assert [check["text"] for check in report["checks"] if not check["passed"]] == []
    assert len(report["checks"]) >= 12
    assert [(item["kind"], item["reused"], item["created"]) for item in report["provisions"]] == [
        ("cold", 0, 2),
        ("warm", 2, 0),
        ("warm", 1, 0),
    ]
    assert {item["stop_reason"] for item in report["retired"]} & set(SELF_TERMINATED)
    assert [*tmp_path.iterdir(), *leftovers(tmp_path)] == []


def test_interrupted_demo_leaves_nothing(tmp_path: Path):
    with subprocess.Popen(
        DEMO, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(tmp_path)
    ) as demo:
        assert demo.stderr is not None
        # A provision waits for a machine that boots.
        line = next((line for line in demo.stderr if " boots " in line), "")
        assert line, "no machine booted"
        demo.send_signal(signal.SIGINT)
        _, rest = demo.communicate(timeout=LIMIT_S)
    assert (demo.returncode, "interrupted" in rest) == (130, True), rest[-5_000:]
    assert [*tmp_path.iterdir(), *leftovers(tmp_path)] == []
