"""Small workflows as data: enough of GitHub's YAML to show real jobs on real machines. Parsing only, no I/O."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from remuda.domain.errors import UserError

MAX_JOBS = 256
DEFAULT_TIMEOUT_MIN = 60.0

_EXPRESSION = re.compile(r"\$\{\{\s*(.*?)\s*\}\}")
_WORKFLOW_KEYS = frozenset({"name", "on", True, "env", "jobs", "permissions", "concurrency"})
_JOB_KEYS = frozenset({"name", "needs", "runs-on", "strategy", "if", "steps", "env", "timeout-minutes"})
_STEP_KEYS = frozenset({"name", "run", "env", "id", "shell"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    run: str
    name: str = ""
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One job of the matrix, expressions resolved."""

    key: str
    name: str
    needs: tuple[str, ...]
    labels: tuple[str, ...]
    condition: str
    steps: tuple[Step, ...]
    env: Mapping[str, str]
    timeout_s: float

    @property
    def hosted(self) -> bool:
        """Runs in this process, as GitHub's own machines would run it."""
        return any(label.startswith("ubuntu-") for label in self.labels)

    def runs_after(self, results: Sequence[str]) -> bool:
        failed = any(result != "success" for result in results)
        match self.condition:
            case "always()":
                return True
            case "failure()":
                return "failure" in results
            case _:
                return not failed


def parse_workflow(document: Any, github: Mapping[str, str]) -> list[Job]:
    """Every job, matrix expanded; `UserError` names the key that cannot be used."""
    workflow = _mapping(document, "the workflow")
    _only(workflow, _WORKFLOW_KEYS, "the workflow")
    env = _env(workflow.get("env"), "env", {"github": github})
    bodies = _mapping(workflow.get("jobs"), "jobs")
    jobs = [job for key, body in bodies.items() for job in _expand(str(key), body, github, env)]
    if not jobs:
        raise _refuse("jobs", "is empty", "add a job with runs-on and steps")
    if len(jobs) > MAX_JOBS:
        raise _refuse("jobs", f"make {len(jobs)} jobs", f"keep to {MAX_JOBS}")
    for job in jobs:
        for need in job.needs:
            if need not in bodies:
                raise _refuse(f"jobs.{job.key}.needs", f"names {need!r}", "name a job of this workflow")
    _check_cycles(jobs)
    return jobs


def _refuse(where: str, what: str, fix: str) -> UserError:
    return UserError(f"{where} {what}", field=where, fix=fix)


def _mapping(value: Any, where: str) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        found = "empty" if value is None else f"a {type(value).__name__}, not a mapping"
        raise _refuse(where, f"is {found}", "docs/reference/commands.md says what run-workflow understands")
    return value


def _only(value: Mapping[Any, Any], known: frozenset[Any], where: str) -> None:
    for key in value:
        if key not in known:
            raise _refuse(where, f"has {key!r}, which run-workflow does not know", "leave it out")


def _expand(key: str, body: Any, github: Mapping[str, str], env: Mapping[str, str]) -> list[Job]:
    where = f"jobs.{key}"
    job = _mapping(body, where)
    _only(job, _JOB_KEYS, where)
    strategy = _mapping(job.get("strategy", {}), f"{where}.strategy")
    matrix = _mapping(strategy.get("matrix", {}), f"{where}.strategy.matrix")
    for axis, values in matrix.items():
        if not isinstance(values, list) or axis in {"include", "exclude"}:
            raise _refuse(f"{where}.strategy.matrix.{axis}", "is not a list of values", "give a list")
    axes = [[(str(axis), value) for value in values] for axis, values in matrix.items()]
    return [_job(key, job, github, env, dict(cell)) for cell in itertools.product(*axes)]


def _job(
    key: str, job: Mapping[Any, Any], github: Mapping[str, str], env: Mapping[str, str], cell: Mapping[str, Any]
) -> Job:
    where = f"jobs.{key}"
    scope: dict[str, Mapping[str, Any]] = {"github": {**github, "job": key}, "matrix": cell}
    env = {**env, **_env(job.get("env"), f"{where}.env", {**scope, "env": env})}
    scope["env"] = env
    needs = job.get("needs", [])
    labels = job.get("runs-on", [])
    steps = job.get("steps", [])
    if not labels:
        raise _refuse(f"{where}.runs-on", "is missing", "give ubuntu-latest or ${{ github.run_id }}")
    if not isinstance(steps, list) or not steps:
        raise _refuse(f"{where}.steps", "is missing", "give a list of run steps")
    suffix = f" ({', '.join(str(value) for value in cell.values())})" if cell else ""
    return Job(
        key=key,
        name=_text(job.get("name", key), scope, where) + suffix,
        needs=tuple(map(str, [needs] if isinstance(needs, str) else needs)),
        labels=tuple(_text(label, scope, where) for label in ([labels] if isinstance(labels, str) else labels)),
        condition=_condition(job.get("if"), where),
        steps=tuple(_step(step, scope, f"{where}.steps[{index}]") for index, step in enumerate(steps)),
        env=env,
        timeout_s=_timeout(job.get("timeout-minutes", DEFAULT_TIMEOUT_MIN), where) * 60,
    )


def _timeout(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1_440:
        raise _refuse(f"{where}.timeout-minutes", f"is {value!r}", "give minutes up to 1440")
    return float(value)


def _condition(value: Any, where: str) -> str:
    if value is None:
        return "success()"
    text = _EXPRESSION.sub(r"\1", str(value)).strip()
    if text not in {"always()", "success()", "failure()"}:
        raise _refuse(f"{where}.if", f"is {text!r}", "use always(), success() or failure()")
    return text


def _step(value: Any, scope: Mapping[str, Mapping[str, Any]], where: str) -> Step:
    step = _mapping(value, where)
    if "uses" in step:
        raise _refuse(where, "uses an action; run-workflow only knows run steps", "replace it by a run step")
    _only(step, _STEP_KEYS, where)
    if not isinstance(step.get("run"), str):
        raise _refuse(where, "has no run", "give shell commands under run")
    env = _env(step.get("env"), f"{where}.env", scope)
    inner = {**scope, "env": {**scope["env"], **env}}
    return Step(run=_text(step["run"], inner, where), name=_text(step.get("name", ""), inner, where), env=env)


def _env(value: Any, where: str, scope: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    if value is None:
        return {}
    return {str(key): _text(item, scope, where) for key, item in _mapping(value, where).items()}


def _text(value: Any, scope: Mapping[str, Mapping[str, Any]], where: str) -> str:
    def resolve(found: re.Match[str]) -> str:
        context, _, name = found.group(1).partition(".")
        values = scope.get(context)
        if values is None or name not in values:
            known = "github.run_id, github.run_attempt, github.repository, github.job, matrix.*, env.*"
            raise _refuse(where, f"has {found.group(0)!r}", f"use one of {known}")
        return str(values[name])

    return _EXPRESSION.sub(resolve, str(value))


def _check_cycles(jobs: Sequence[Job]) -> None:
    waiting = {job.key: set(job.needs) for job in jobs}
    while waiting:
        free = [key for key, needs in waiting.items() if not needs & waiting.keys()]
        if not free:
            raise _refuse("jobs", f"wait for each other: {', '.join(sorted(waiting))}", "break the circle of needs")
        for key in free:
            del waiting[key]
