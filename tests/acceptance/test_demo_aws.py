"""The short form of `make demo-aws`: the real story with `backend = "aws"`, and nothing left of it, however it ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.aws_demo import ENDED_ITSELF
from tests.support.ec2_machine.machine import why_not

#: Generous: nothing waits for it unless something is broken.
LIMIT_S = 600
pytestmark = [pytest.mark.skipif(bool(why_not()), reason=why_not()), pytest.mark.timeout(LIMIT_S + 60)]
ROOT = Path(__file__).parents[2]
DEMO = (sys.executable, "-m", "tests.support.aws_demo", "--short", "--json")


def environment(folder: Path) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "TMPDIR": str(folder), "HOME": str(folder)}


def left_of(folder: Path) -> list[str]:
    """Processes, mounts and files that mention or lie in the folder."""
    name = str(folder)
    found = [str(path) for path in folder.iterdir()]
    found += [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if name in line]
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
                if name.encode() in words:
                    found.append(words.replace(b"\0", b" ").decode(errors="replace")[:200])
    return found


def test_the_story_on_aws_holds_and_leaves_nothing(tmp_path: Path):
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
    assert {item["stop_reason"] for item in report["retired"]} & set(ENDED_ITSELF)
    assert left_of(tmp_path) == []


def test_an_interrupted_story_leaves_nothing(tmp_path: Path):
    with subprocess.Popen(
        DEMO, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(tmp_path)
    ) as demo:
        assert demo.stderr is not None
        # A machine is on, and a provision waits for it.
        told = next((line for line in demo.stderr if " boots " in line), "")
        assert told, "no machine was booted"
        demo.send_signal(signal.SIGINT)
        _, rest = demo.communicate(timeout=LIMIT_S)
    assert (demo.returncode, "interrupted" in rest) == (130, True), rest[-5_000:]
    assert left_of(tmp_path) == []
