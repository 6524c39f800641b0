"""Recording of the lines that each test executes, and of its duration: `python -m mutation_testing.recording`.

Lines are kept by coverage.py, with the test as context. Outcome and CPU time of each test are kept in a JSON file.
"""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import pytest
from coverage import Coverage, CoverageData

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build" / "mutation-testing"
LINES_FILE = BUILD / "lines.coverage"
TESTS_FILE = BUILD / "tests.json"
#: Packages of `remuda` that are mutated.
PACKAGES = ("domain", "controlplane", "agent", "adapters")
SOURCES = tuple(ROOT / "src" / "remuda" / package for package in PACKAGES)
#: Folders of tests that judge mutants. The others test entry points, or start a process per test.
TESTS = (
    *(
        f"tests/unit/{name}"
        for name in ("domain", "agent", "controlplane", "aws", "github", "config", "web", "aws_lambda")
    ),
    "tests/conformance",
)
#: Tests of files and policies, which no mutant changes, or which are too slow for a judge.
IGNORED = (
    "tests/conformance/test_sbom.py",
    "tests/conformance/test_policy_lint.py",
    "tests/conformance/test_cloudformation.py",
    "tests/conformance/test_smoke_account.py",
    "tests/conformance/test_fake_github_openapi.py",
    "tests/conformance/test_oidc.py",
    "tests/conformance/test_sandbox.py",
)
#: Seconds of CPU time after which a recorded test is ended. A judge has no time for such tests.
MAX_TEST_S = 4.0
#: Arguments of pytest: no workers, no cache on disk, no properties, which take as long as a hundred other tests.
PYTEST_ARGUMENTS = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not hypothesis")


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedTest:
    #: Digest of the file that contains the test.
    digest: str
    passed: bool
    #: CPU time of this process, without fixtures of modules and sessions.
    seconds: float


def digest(*files: Path) -> str:
    found = hashlib.sha256()
    for file in files:
        found.update(file.read_bytes())
    return found.hexdigest()[:16]


def source_digest() -> str:
    """The digest of all code that is mutated: recorded line numbers are valid for this code only."""
    return digest(*(file for folder in SOURCES for file in sorted(folder.rglob("*.py"))))


class _TooSlow(BaseException):
    """Ends a test, whatever exceptions it handles."""


def _end_test(*_: object) -> NoReturn:
    raise _TooSlow


class Recorder:
    """A plugin of pytest that records each test under its own context."""

    def __init__(self, coverage: Coverage) -> None:
        self._coverage = coverage
        self.tests: dict[str, RecordedTest] = {}
        self._outcomes: list[str] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._coverage.switch_context(item.nodeid)
        self._outcomes = []
        started = time.process_time()
        try:
            return (yield)
        finally:
            seconds = time.process_time() - started
            self._coverage.switch_context("")
            passed = self._outcomes == ["passed"] * 3
            self.tests[item.nodeid] = RecordedTest(digest=digest(item.path), passed=passed, seconds=round(seconds, 4))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Iterator[None]:
        # Again and again: the first exception may end a background task only.
        before = signal.signal(signal.SIGVTALRM, _end_test)
        signal.setitimer(signal.ITIMER_VIRTUAL, MAX_TEST_S, 0.2)
        try:
            return (yield)
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, before)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._outcomes.append(report.outcome)


@dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """The tests that passed without a mutant, and the lines that each one executes."""

    tests: Mapping[str, RecordedTest]
    _lines: CoverageData
    #: Tests by file and line, as far as they were asked for.
    _known: dict[Path, dict[int, list[str]]] = field(default_factory=dict)

    def of_lines(self, file: Path, lines: range | None = None) -> set[str]:
        """Tests that execute one of these lines of a file; any of its functions if none are given."""
        if file not in self._known:
            self._known[file] = self._lines.contexts_by_lineno(str(file))
        chosen = (tests for line, tests in self._known[file].items() if lines is None or line in lines)
        return {test for tests in chosen for test in tests if test in self.tests}


def load() -> Recording:
    tests = {name: RecordedTest(**fields) for name, fields in _read()["tests"].items()}
    lines = CoverageData(basename=str(LINES_FILE))
    lines.read()
    return Recording(tests={name: test for name, test in tests.items() if test.passed}, _lines=lines)


def stale_files() -> list[str]:
    """Test files that have to be recorded, because they or the code changed since the last recording."""
    document = _read()
    tests = document["tests"] if document["source"] == source_digest() else {}
    known = {name.partition("::")[0]: fields["digest"] for name, fields in tests.items()}
    files = (file for name in TESTS for file in sorted((ROOT / name).rglob("test_*.py")))
    names = {str(file.relative_to(ROOT)): file for file in files}
    return [name for name, file in names.items() if name not in IGNORED and known.get(name) != digest(file)]


def record(names: Sequence[str]) -> None:
    """Run these files of tests, and add each one to the recording when it is done."""
    BUILD.mkdir(parents=True, exist_ok=True)
    document = _read()
    if document["source"] != source_digest():
        document = {"source": source_digest(), "tests": {}}
        LINES_FILE.unlink(missing_ok=True)
    for name in names:
        coverage = Coverage(data_file=str(LINES_FILE), source=[*map(str, SOURCES)], config_file=False)
        coverage.load()
        recorder = Recorder(coverage)
        coverage.start()
        try:
            pytest.main([*PYTEST_ARGUMENTS, name], plugins=[recorder])
        finally:
            coverage.stop()
            coverage.save()
        files = {test.partition("::")[0] for test in recorder.tests}
        old = {test: fields for test, fields in document["tests"].items() if test.partition("::")[0] not in files}
        document["tests"] = old | {test: asdict(fields) for test, fields in recorder.tests.items()}
        TESTS_FILE.write_text(json.dumps(document), encoding="utf-8")


def record_apart(names: Sequence[str]) -> None:
    """Record in its own process, so that this one stays free of what tests leave behind."""
    subprocess.run([sys.executable, "-m", "mutation_testing.recording", *names], cwd=ROOT, check=True)


def _read() -> dict[str, Any]:
    if not TESTS_FILE.exists():
        return {"source": "", "tests": {}}
    document: dict[str, Any] = json.loads(TESTS_FILE.read_text(encoding="utf-8"))
    return document


if __name__ == "__main__":
    record(sys.argv[1:] or stale_files())
