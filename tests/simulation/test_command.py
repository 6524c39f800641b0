"""`python -m simulation`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from simulation.faults import FEW, Fault

ROOT = Path(__file__).parents[2]
SMALL = ("--hours", "0.1", "--instances", "4")


def simulation(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "simulation", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_campaign_prints_a_summary_as_json():
    done = simulation("--seeds", "6", "--first-seed", "3", *SMALL, "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert (document["seeds"], document["violations"], document["first_seed"]) == (6, [], 3)
    assert document["machines"] > 0
    assert document["checks"] > 100
    assert set(document["faults"]) == {fault.value for fault in Fault}
    assert document["seeds_per_s"] > 0


def test_one_seed_with_trace_is_reproducible():
    first, again = (simulation("--seed", "5", "--trace", *SMALL, "--json") for _ in range(2))
    assert first.returncode == 0, first.stderr
    document = json.loads(first.stdout)
    assert document["trace_hash"] == json.loads(again.stdout)["trace_hash"]
    assert any("record" in line for line in document["trace"])


def test_campaign_prints_a_summary_as_text():
    done = simulation("--seeds", "2", "--faults", "crash, write-lost", *SMALL)
    assert done.returncode == 0, done.stderr
    assert "seeds/s" in done.stdout
    assert "0 violations" in done.stdout


def test_few_faults():
    done = simulation("--seeds", "2", "--first-seed", "0", "--faults", "few", *SMALL, "--json")
    assert done.returncode == 0, done.stderr
    assert 0 < sum(1 for count in json.loads(done.stdout)["faults"].values() if count) <= 2 * FEW


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--faults", "rain"), "rain"),
        (("--faults", ","), "empty"),
        (("--trace",), "--seed"),
        (("--seeds", "0"), "seeds"),
        (("--hours", "never"), "hours"),
    ],
)
def test_bad_input_prints_one_line(arguments: tuple[str, ...], word: str):
    done = simulation(*arguments)
    assert done.returncode == 2
    assert word in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
