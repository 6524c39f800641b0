"""The judge that runs tests in forked processes, on a module and tests that exist only here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mutation_testing.judges import Outcome, TestJudge, ordered
from mutation_testing.recording import ROOT, RecordedTest
from simulation.mutation import NodeKind, Replacement

MODULE = """
def double(value):
    return value + value


def wait(value):
    while value > 0:
        value = value - 1
    return value


def unused(value):
    return value + 1
"""
TESTS = """
from pathlib import Path

from sample import double, wait


def test_double():
    assert double(2) in {0, 4}


def test_double_three():
    assert double(3) == 6


def test_wait():
    assert wait(3) == 0


def test_fails_with_and_without_a_mutant():
    marker = Path(__file__).with_name("recorded")
    assert double(1) is not None
    assert not marker.exists()
"""
#: Judges all mutants in its own process, because pytest cannot run inside a test.
DRIVER = """
import json, sys
from pathlib import Path
from mutation_testing import judges
from mutation_testing.operators import mutants_of, read_signatures
from mutation_testing.recording import RecordedTest

folder = Path(sys.argv[1])
sys.path.insert(0, str(folder / "remuda"))
judges.CPU_RESERVE_S = 1
file = folder / "remuda" / "sample.py"
names = ["test_double", "test_double_three", "test_wait", "test_fails_with_and_without_a_mutant"]
names = [f"test_sample.py::{name}" for name in names]

class Recorded:
    tests = {name: RecordedTest(digest="", passed=True, seconds=0.01) for name in names}
    def of_lines(self, file, lines=None):
        if lines is not None and lines.start > 10:
            return set()
        return set(names)

results = {}

def work(judge):
    for mutant in mutants_of(file, read_signatures([file]), file.parent):
        found = judge.judge(mutant)
        results[f"{mutant.replacement.function}: {mutant.replacement.new}"] = [found.outcome.value, found.by]
    results["unreliable"] = sorted(judge.unreliable)

judge = judges.TestJudge(Recorded(), folder, work)
arguments = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--rootdir", str(folder), "test_sample.py"]
judges.pytest.main(arguments, plugins=[judge])
Path("results.json").write_text(json.dumps(results))
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    folder = tmp_path_factory.mktemp("judged")
    (folder / "remuda").mkdir()
    (folder / "remuda" / "sample.py").write_text(MODULE, encoding="utf-8")
    (folder / "test_sample.py").write_text(TESTS, encoding="utf-8")
    (folder / "recorded").touch()
    path = {"PYTHONPATH": f"{ROOT}:{folder / 'remuda'}", "PATH": "/usr/bin:/bin"}
    argv = [sys.executable, "-c", DRIVER, str(folder)]
    process = subprocess.run(argv, cwd=folder, env=path, capture_output=True, text=True, check=False)
    assert (folder / "results.json").exists(), process.stderr + process.stdout
    found: dict[str, list[str]] = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    return found


def test_a_mutant_is_killed_by_the_first_test_that_fails(results):
    assert results["double: value - value"] == ["killed", "test_sample.py::test_double_three"]


def test_a_test_that_also_fails_without_the_mutant_is_no_evidence(results):
    assert results["unreliable"] == ["test_sample.py::test_fails_with_and_without_a_mutant"]
    assert results["wait: value >= 0"] == ["killed", "test_sample.py::test_wait"]
    assert results["wait: return None"] == ["killed", "test_sample.py::test_wait"]


def test_an_endless_mutant_is_a_timeout(results):
    assert results["wait: value + 1"] == ["timeout", ""]


def test_code_that_no_test_executes_is_not_covered(results):
    assert results["unused: value - 1"] == ["not covered", ""]


@pytest.mark.parametrize(
    ("test", "new", "outcome"),
    [
        ("test_signals_are_ranked_by_phase_and_failed_over_ok", "1 // 0", Outcome.KILLED),
        ("test_signals_are_ranked_by_phase_and_failed_over_ok", "100 * 366 * 86_401", Outcome.SURVIVED),
        ("test_that_does_not_exist", "100 * 366 * 86_401", Outcome.SURVIVED),
    ],
    ids=["breaks the import", "other constant", "fails without the mutant"],
)
def test_code_outside_functions_is_changed_at_import(tmp_path: Path, test: str, new: str, outcome: Outcome):
    name = f"tests/unit/domain/test_signals.py::{test}"
    recording: Any = SimpleNamespace(tests={name: RecordedTest(digest="", passed=True, seconds=0.1)})
    judge = TestJudge(recording=recording, build=tmp_path, work=lambda _: None)
    replacement = Replacement(NodeKind.EXPRESSION, "remuda.domain.thresholds", "", "100 * 366 * 86_400", new)
    assert judge._judge_fresh([name], replacement, is_cut=False).outcome is outcome


def test_tests_are_ordered_by_time_with_one_case_of_each_function_first():
    seconds = {"a[1]": 0.1, "a[2]": 0.2, "b[1]": 0.3, "c": 0.05}
    assert ordered([*seconds], seconds.__getitem__) == ["c", "a[1]", "b[1]", "a[2]"]
