"""Judges of mutants: the tests that cover the changed code, and a short simulation.

One process collects all tests. For each mutant it forks a process that replaces the code of the changed function and
runs the tests, fastest first, until one fails. Code outside functions is changed at import, in a new process. A test
that fails with a mutant is run again without it: if it fails then as well, it is no evidence and is not used any more.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import resource
import select
import signal
import subprocess
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import _lru_cache_wrapper
from pathlib import Path
from types import CodeType, FunctionType

import pytest

from mutation_testing.operators import GeneratedMutant
from mutation_testing.recording import PYTEST_ARGUMENTS, ROOT, Recording
from simulation.campaign import CampaignSettings, first_violation
from simulation.faults import Swarm
from simulation.mutation import MutationError, Replacement, command, mutated_tree

#: Code that the simulation runs: changes of the lifecycle.
LIFECYCLE = re.compile(
    r"remuda\.(domain\.(transitions|thresholds|signals)"
    r"|controlplane\.(provision|release|refresh|demand|scale_down)|agent\.(decide|loop))\b"
)
#: The short simulation: settings, and how many seeds of each.
SIMULATION = (
    (CampaignSettings(hours=0.25, instances=5), 40),
    (CampaignSettings(hours=0.15, instances=3, demand=True), 20),
    # A fault excuses what it disturbs: some mutants show in worlds with few.
    (CampaignSettings(hours=0.25, instances=5, faults=Swarm.FEW), 60),
    (CampaignSettings(hours=0.15, instances=3, faults=Swarm.FEW, demand=True), 20),
)
#: CPU seconds that it may take: some mutants make worlds that never come to rest.
SIMULATION_CPU_S = 240
#: CPU seconds of recorded time that the tests of one mutant may take.
BUDGET_S = 20.0
#: Tests that share a forked process: few at first, because most mutants are killed by the first ones.
BATCHES = (5, 15, 40)
#: Limits of a process: CPU seconds beyond three times the recorded time, and seconds without progress.
CPU_RESERVE_S = 5.0
STALLED_S = 30.0
#: Limit of a process in seconds, for one that waits in a loop for what never happens.
MAX_S = 240.0
#: Test files of a mutant outside functions, whose tests are collected in a new process.
FRESH_FILES = 6
#: The exit status of a forked process, if it did not write its result.
_FAILED_STATUS = 70


class Outcome(StrEnum):
    KILLED = "killed"
    #: Killed by a limit of time.
    TIMEOUT = "timeout"
    SURVIVED = "survived"
    #: The changed function is never executed by a test.
    NOT_COVERED = "not covered"


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    outcome: Outcome
    #: The test or the invariant that failed.
    by: str = ""
    #: Number of tests that were run.
    tests: int = 0
    #: Whether not all covering tests fit in the budget.
    is_cut: bool = False

    @property
    def is_killed(self) -> bool:
        return self.outcome in {Outcome.KILLED, Outcome.TIMEOUT}


@dataclass(slots=True)
class _ForkResult:
    #: What the process returned; None if it died.
    answer: str | None
    is_timeout: bool = False


def run_forked(work: Callable[[], str], *, cpu_s: float, log: Path) -> _ForkResult:
    """Run `work` in a copy of this process, within limits."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = _FAILED_STATUS
        try:
            os.setsid()
            os.close(reader)
            resource.setrlimit(resource.RLIMIT_CPU, (int(cpu_s) + 1, int(cpu_s) + 2))
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.write(writer, work().encode())
            status = 0
        except BaseException:  # noqa: BLE001 - nothing may leave this process
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(status)
    os.close(writer)
    is_timeout = _wait_for_end(pid, reader)
    chunks = []
    while not is_timeout and (chunk := os.read(reader, 65536)):
        chunks.append(chunk)
    os.close(reader)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU:
        is_timeout = True
    return _ForkResult(b"".join(chunks).decode() if status == 0 else None, is_timeout)


def _wait_for_end(pid: int, reader: int) -> bool:
    """Wait for the answer or the death of a process. True if it took too long or did nothing for a while."""
    started = since = time.monotonic()
    used = -1.0
    while not select.select([reader], [], [], 1.0)[0]:
        now = _cpu_seconds(pid)
        if now > used + 0.02:
            used, since = now, time.monotonic()
        elif time.monotonic() - since > STALLED_S:
            return True
        if time.monotonic() - started > MAX_S:
            return True
    return False


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    # User and system time of the process and of its children.
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def functions_by_code() -> dict[tuple[str, str], list[FunctionType]]:
    """All functions of this process by file and qualified name."""
    found: dict[tuple[str, str], list[FunctionType]] = defaultdict(list)
    for item in gc.get_objects():
        if isinstance(item, FunctionType) and "/remuda/" in item.__code__.co_filename:
            found[item.__code__.co_filename, item.__code__.co_qualname].append(item)
    return found


def _codes(code: CodeType) -> Iterator[CodeType]:
    for item in code.co_consts:
        if isinstance(item, CodeType):
            yield item
            yield from _codes(item)


def mutated_code(file: Path, replacement: Replacement) -> CodeType:
    """The compiled function with the replacement."""
    tree = mutated_tree(file.read_text(encoding="utf-8"), [replacement])
    found = [code for code in _codes(compile(tree, file, "exec")) if code.co_qualname == replacement.function]
    if len(found) != 1:
        raise MutationError(f"{replacement.module} has {len(found)} functions {replacement.function}, expected one")
    return found[0]


def swap_code(functions: Sequence[FunctionType], code: CodeType) -> None:
    """Give the functions another body, and forget what caches hold."""
    for function in functions:
        function.__code__ = code
    for item in gc.get_objects():
        if isinstance(item, _lru_cache_wrapper):
            item.cache_clear()


def covering(mutant: GeneratedMutant, recording: Recording) -> set[str]:
    """Tests that execute the changed code. If it is in no function: those of functions that mention the constant or
    field, or else all of the module.
    """
    if mutant.is_in_function:
        return recording.of_lines(mutant.file, range(mutant.first_line, mutant.last_line + 1))
    mentioned = {test for file, lines in mutant.mentions() for test in recording.of_lines(file, lines)}
    return mentioned or recording.of_lines(mutant.file)


def ordered(tests: Sequence[str], seconds: Callable[[str], float]) -> list[str]:
    """Fastest first, but one case of each test function before the second cases."""
    counts = Counter[str]()
    ranked = []
    for name in sorted(tests, key=lambda name: (seconds(name), name)):
        function = name.partition("[")[0]
        ranked.append((counts[function], seconds(name), name))
        counts[function] += 1
    return [name for _, _, name in sorted(ranked)]


@dataclass(slots=True, eq=False)
class TestJudge:
    """Runs tests in forked processes. A plugin of pytest: it runs `work` instead of the tests."""

    recording: Recording
    build: Path
    work: Callable[[TestJudge], None]
    items: dict[str, pytest.Item] = field(default_factory=dict)
    #: Tests that failed without a mutant.
    unreliable: set[str] = field(default_factory=set)
    _functions: dict[tuple[str, str], list[FunctionType]] = field(default_factory=dict)
    _failed: list[str] = field(default_factory=list)

    __test__ = False

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self.items = {item.nodeid: item for item in session.items if item.nodeid in self.recording.tests}
        self._start_servers(session)
        self._functions = functions_by_code()
        gc.collect()
        gc.freeze()
        self.work(self)
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.append(report.nodeid)

    def _start_servers(self, session: pytest.Session) -> None:
        """Run one test with each fixture of the session, so that forked processes share the servers it started."""
        for name in ("server", "other_sqs"):
            using = [item for item in self.items.values() if name in getattr(item, "fixturenames", ())]
            if using:
                session.config.hook.pytest_runtest_protocol(item=using[0], nextitem=session)

    def judge(self, mutant: GeneratedMutant) -> Judgement:
        found = [name for name in covering(mutant, self.recording) if name in self.items]
        if not found:
            return Judgement(outcome=Outcome.NOT_COVERED)
        names = [name for name in ordered(found, self._seconds) if name not in self.unreliable]
        chosen: list[str] = []
        total = 0.0
        for name in names:
            total += self._seconds(name)
            if chosen and total > BUDGET_S:
                break
            chosen.append(name)
        replacement = mutant.located()
        if mutant.is_in_function:
            functions = self._functions.get((str(mutant.file), replacement.function), [])
            code = mutated_code(mutant.file, replacement)
            if functions and code.co_freevars == functions[0].__code__.co_freevars:
                return self._judge_forked(chosen, functions, code, is_cut=len(chosen) < len(names))
        return self._judge_fresh(chosen, replacement, is_cut=len(chosen) < len(names))

    def _seconds(self, name: str) -> float:
        return self.recording.tests[name].seconds

    def _judge_forked(
        self, chosen: list[str], functions: list[FunctionType], code: CodeType, *, is_cut: bool
    ) -> Judgement:
        waiting, run, number = chosen, 0, 0
        while waiting:
            size = BATCHES[min(number, len(BATCHES) - 1)]
            # Neighbours share the fixtures of their module.
            batch = sorted(waiting[:size], key=lambda name: name.partition("::")[0])
            found = self._run(batch, lambda: swap_code(functions, code))
            run += len(batch)
            if found.answer:
                if not self._is_unreliable(found.answer):
                    return Judgement(outcome=Outcome.KILLED, by=found.answer, tests=run)
                waiting.remove(found.answer)
                continue
            if found.answer is None:
                if self._run(batch).answer is not None:
                    outcome = Outcome.TIMEOUT if found.is_timeout else Outcome.KILLED
                    return Judgement(outcome=outcome, by="" if found.is_timeout else "the process died", tests=run)
                self.unreliable.update(batch)
            waiting, number = waiting[size:], number + 1
        return Judgement(outcome=Outcome.SURVIVED, tests=run, is_cut=is_cut)

    def _is_unreliable(self, name: str) -> bool:
        """Whether a test fails without a mutant."""
        if name not in self.items:
            return False
        if self._run([name]).answer == "":
            return False
        self.unreliable.add(name)
        return True

    def _run(self, names: Sequence[str], prepare: Callable[[], None] = lambda: None) -> _ForkResult:
        """The first test that failed; an empty text if all passed."""

        def work() -> str:
            prepare()
            items = [self.items[name] for name in names]
            self._failed = []
            # To go to the session ends the fixtures of the last file, but not those of the session.
            for item, following in zip(items, [*items[1:], items[0].session], strict=True):
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                if self._failed:
                    return self._failed[0]
            return ""

        seconds = sum(map(self._seconds, names))
        return run_forked(work, cpu_s=CPU_RESERVE_S + 3 * seconds, log=self.build / "output.txt")

    def _judge_fresh(self, chosen: list[str], replacement: Replacement, *, is_cut: bool) -> Judgement:
        """Run whole test functions of a few files in a new process, because the change may rename cases."""
        functions = list(dict.fromkeys(name.partition("[")[0] for name in chosen))
        files = [*dict.fromkeys(name.partition("::")[0] for name in functions)][:FRESH_FILES]
        names = [name for name in functions if name.partition("::")[0] in files]
        # With the start of Python and the collection of the tests.
        limit_s = 20 + CPU_RESERVE_S + 3 * sum(map(self._seconds, chosen))
        for batch in filter(None, (names[: BATCHES[0]], names[BATCHES[0] :])):
            found = _run_fresh([replacement], batch, limit_s)
            if found is None:
                return Judgement(outcome=Outcome.TIMEOUT, tests=len(names))
            failed = [name for name in found if not self._is_unreliable(name)]
            # Errors that belong to no test, for example of an import, are evidence only if the mutant causes them.
            if failed and (failed[0] in self.items or _run_fresh([], batch, limit_s) == []):
                return Judgement(outcome=Outcome.KILLED, by=failed[0], tests=len(names))
        return Judgement(outcome=Outcome.SURVIVED, tests=len(names), is_cut=is_cut or len(names) < len(functions))


def _run_fresh(replacements: Sequence[Replacement], names: Sequence[str], limit_s: float) -> list[str] | None:
    """Run tests in a new process. Return those that failed, or None after a time limit."""
    try:
        process = subprocess.run(
            command(replacements, "mutation_testing.fresh", *names),
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=20 * limit_s,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (int(limit_s), int(limit_s) + 1)),
        )
    except subprocess.TimeoutExpired:
        return None
    if process.returncode == -signal.SIGXCPU:
        return None
    failed: list[str] = json.loads(process.stdout.rpartition("RESULT ")[2]) if process.returncode == 0 else ["import"]
    return failed


def collect_and_run(judge: TestJudge, files: Sequence[str]) -> int:
    """Collect the tests of these files, then let the judge work."""
    # Without capture of file descriptors, forked processes can redirect the output of pytest.
    return pytest.main([*PYTEST_ARGUMENTS, "--capture=sys", *files], plugins=[judge])


class SimulationJudge:
    """Runs the short simulation in a forked process."""

    def __init__(self, build: Path) -> None:
        self._build = build
        self._functions = functions_by_code()
        gc.freeze()

    def judge(self, mutant: GeneratedMutant) -> Judgement:
        replacement = mutant.located()
        if not mutant.is_in_function:
            return self._judge_fresh(replacement)
        functions = self._functions.get((str(mutant.file), replacement.function), [])
        if not functions:
            return Judgement(outcome=Outcome.NOT_COVERED)
        code = mutated_code(mutant.file, replacement)

        def work() -> str:
            try:
                swap_code(functions, code)
                for settings, seeds in SIMULATION:
                    found = first_violation(range(seeds), settings)
                    if found.seed is not None:
                        return found.invariant
            except Exception as error:  # noqa: BLE001 - whatever a mutant raises
                return type(error).__name__
            return ""

        result = run_forked(work, cpu_s=SIMULATION_CPU_S, log=self._build / "output.txt")
        if result.is_timeout:
            return Judgement(outcome=Outcome.TIMEOUT)
        by = result.answer if result.answer is not None else "the process died"
        return Judgement(outcome=Outcome.KILLED if by else Outcome.SURVIVED, by=by)

    def _judge_fresh(self, replacement: Replacement) -> Judgement:
        for settings, seeds in SIMULATION:
            argv = command([replacement], "simulation.campaign", *settings.arguments(seeds))
            try:
                process = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False, timeout=1200)
            except subprocess.TimeoutExpired:
                return Judgement(outcome=Outcome.TIMEOUT)
            if "never imported" in process.stderr:
                return Judgement(outcome=Outcome.NOT_COVERED)
            if process.returncode:
                return Judgement(outcome=Outcome.KILLED, by="error")
            if (found := json.loads(process.stdout))["seed"] is not None:
                return Judgement(outcome=Outcome.KILLED, by=found["invariant"])
        return Judgement(outcome=Outcome.SURVIVED)
