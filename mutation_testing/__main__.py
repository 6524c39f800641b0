"""Mutation testing of a random sample: `python -m mutation_testing`, or `make mutants`."""

from __future__ import annotations

import argparse
import json
import secrets
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mutation_testing import recording
from mutation_testing.judges import LIFECYCLE, Judgement, SimulationJudge, TestJudge, collect_and_run, covering
from mutation_testing.operators import GeneratedMutant, all_mutants, sample
from mutation_testing.recording import BUILD, PACKAGES
from mutation_testing.verdicts import SIMULATION_VERDICTS_FILE, VERDICTS_FILE, load_verdicts, results_file, score
from simulation.mutation import MutationError

SAMPLE = 300


@dataclass(slots=True)
class Run:
    """Judges mutants one after the other, and writes the results after each one. An interrupted run is continued."""

    seed: int
    judge_name: str
    mutants: Sequence[GeneratedMutant]
    results: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def file(self) -> Path:
        return BUILD / f"results-{self.judge_name}-{self.seed}.json"

    def pending(self) -> list[GeneratedMutant]:
        return [mutant for mutant in self.mutants if mutant.id not in self.results]

    def load(self, *, only_killed: bool) -> None:
        """Read the results of an earlier run with this seed. Survivors may be tried again, with new tests."""
        if not self.file.exists():
            return
        known = {item["id"]: item for item in json.loads(self.file.read_text(encoding="utf-8"))}
        wanted = {mutant.id for mutant in self.mutants}
        self.results = {
            name: item
            for name, item in known.items()
            if name in wanted and (item["outcome"] in {"killed", "timeout"} or not only_killed)
        }

    def judge_all(self, judge: Callable[[GeneratedMutant], Judgement]) -> None:
        for mutant in self.pending():
            try:
                found = judge(mutant)
            except MutationError as error:
                _say(f"{mutant.place}: not tried: {error}")
                continue
            self.add(mutant, found)

    def add(self, mutant: GeneratedMutant, found: Judgement) -> None:
        self.results[mutant.id] = {
            "id": mutant.id,
            "module": mutant.replacement.module,
            "function": mutant.replacement.function,
            "operator": mutant.operator,
            "old": mutant.replacement.old,
            "new": mutant.replacement.new,
            "place": mutant.place,
            "outcome": found.outcome.value,
            "by": found.by,
            "tests": found.tests,
            "cut": found.is_cut,
        }
        self.write()
        change = f"{_short(mutant.replacement.old)} → {_short(mutant.replacement.new)}"
        _say(f"[{len(self.results)}/{len(self.mutants)}] {found.outcome} {mutant.place} {mutant.operator}: {change}")

    def write(self) -> None:
        self.file.write_text(json.dumps([*self.results.values()], indent=1), encoding="utf-8")


def _short(text: str) -> str:
    return " ".join(text.split())[:60] or "(nothing)"


def _say(line: str) -> None:
    # To the standard error: pytest captures the standard output.
    sys.__stderr__.write(f"{line}\n")  # type: ignore[union-attr] # never closed
    sys.__stderr__.flush()  # type: ignore[union-attr]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m mutation_testing", description=__doc__)
    parser.add_argument("--sample", type=int, default=SAMPLE, help=f"number of mutants (default: {SAMPLE})")
    parser.add_argument("--seed", type=int, help="seed of the sample (default: a random one)")
    parser.add_argument(
        "--module", default="", help="only modules whose name begins with this, for example domain.trust"
    )
    parser.add_argument(
        "--judge",
        choices=("all", "tests", "simulation"),
        default="all",
        help="what has to kill the mutants (default: all)",
    )
    parser.add_argument(
        "--survivors", action="store_true", help="try the survivors of the last run with this seed again"
    )
    parser.add_argument("--write", action="store_true", help="keep the results for the docs")
    given = parser.parse_args(arguments)
    seed: int = secrets.randbelow(10_000) if given.seed is None else given.seed
    mutants = [item for item in all_mutants() if item.replacement.module.startswith(f"remuda.{given.module}")]
    chosen = sample(mutants, given.sample, seed)
    if given.judge == "simulation":
        chosen = [mutant for mutant in chosen if LIFECYCLE.match(mutant.replacement.module)]
    _say(f"seed {seed}: {len(chosen)} of {len(mutants)} mutants")
    BUILD.mkdir(parents=True, exist_ok=True)
    run = Run(seed=seed, judge_name=given.judge, mutants=chosen)
    run.load(only_killed=given.survivors)
    if given.judge == "simulation":
        run.judge_all(SimulationJudge(BUILD).judge)
    else:
        _judge_with_tests(run, with_simulation=given.judge == "all")
    return _report(run, seed=seed, write=given.write)


def _judge_with_tests(run: Run, *, with_simulation: bool) -> None:
    if stale := recording.stale_files():
        _say(f"recording the lines that each test executes: {len(stale)} files")
        recording.record_apart(stale)
    recorded = recording.load()

    def work(judge: TestJudge) -> None:
        run.judge_all(judge.judge)
        if judge.unreliable:
            _say(f"failed without a mutant, and were not used: {', '.join(sorted(judge.unreliable))}")

    if pending := run.pending():
        files = sorted({name.partition("::")[0] for mutant in pending for name in covering(mutant, recorded)})
        collect_and_run(TestJudge(recorded, BUILD, work), files)
    if not with_simulation:
        return
    judge = SimulationJudge(BUILD)
    for mutant in run.mutants:
        found = run.results.get(mutant.id)
        if found and found["outcome"] in {"survived", "not covered"} and LIFECYCLE.match(mutant.replacement.module):
            simulated = judge.judge(mutant)
            if simulated.is_killed:
                run.add(mutant, simulated)


def _report(run: Run, *, seed: int, write: bool) -> int:
    verdicts = load_verdicts(SIMULATION_VERDICTS_FILE if run.judge_name == "simulation" else VERDICTS_FILE)
    results = [run.results[mutant.id] for mutant in run.mutants if mutant.id in run.results]
    for package in PACKAGES:
        found = score([item for item in results if item["module"].split(".")[1] == package], verdicts)
        if found.tried:
            killed = f"{found.killed} of {found.tried} killed ({found.timeouts} by a time limit)"
            _say(f"{package:<13} {found.percent:3.0f} %: {killed}, {found.equivalent} equivalent")
    survivors = [item for item in results if item["outcome"] not in {"killed", "timeout"}]
    new = [item for item in survivors if item["id"] not in verdicts]
    for item in sorted(new, key=lambda item: item["place"]):
        tests = f"{item['tests']} tests" if item["tests"] else "no test"
        _say(f"\n{item['id']} {item['place']} {item['function']} ({item['operator']}, {tests})")
        _say(f"  - {item['old']}\n  + {item['new'] or '(nothing)'}")
    _say(f"\nseed {seed}: {len(survivors)} survivors, {len(new)} without a verdict")
    if write:
        document = {"seed": seed, "judge": run.judge_name, "sample": len(run.mutants), "mutants": results}
        text = json.dumps(document, indent=1, ensure_ascii=False)
        results_file(run.judge_name).write_text(f"{text}\n", encoding="utf-8")
    return 1 if new else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
