"""Parser for the subset of GitHub's workflow syntax that `run-workflow` supports. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import Any

import yaml

from remuda.domain.errors import UserError
from remuda.domain.text import quote

MAX_JOBS = 256
#: Maximum number of steps of all jobs together, after the expansion of the matrix.
MAX_STEPS = 2_000
#: Maximum length of a value after its expressions are resolved: Linux's limit of an argument.
MAX_TEXT = 128 * 1024
MAX_BYTES = 256 * 1024
#: Maximum length of a name, and of a value quoted in an error.
MAX_SHOWN = 80
#: Maximum nesting depth of flow collections; the scanner slows down with each level.
MAX_DEPTH = 50
#: Maximum size of an integer.
MAX_BITS = 64
DEFAULT_TIMEOUT_MIN = 60.0

_WORKFLOW_KEYS = frozenset({"name", "on", True, "env", "jobs", "permissions", "concurrency"})
_JOB_KEYS = frozenset(
    {"name", "needs", "runs-on", "strategy", "if", "steps", "env", "timeout-minutes", "permissions", "environment"}
)
_STEP_KEYS = frozenset({"name", "run", "env", "id", "shell"})


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkflowStep:
    run: str
    name: str = ""
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkflowJob:
    """One job of the expanded matrix, with its expressions resolved."""

    key: str
    name: str
    needs: tuple[str, ...]
    labels: tuple[str, ...]
    condition: str
    steps: tuple[WorkflowStep, ...]
    env: Mapping[str, str]
    timeout_s: float
    #: Whether its steps may request OIDC tokens (`permissions: id-token: write`).
    may_request_tokens: bool = False
    #: The deployment environment, or an empty text.
    environment: str = ""

    @property
    def hosted(self) -> bool:
        """Whether the job runs on this machine in place of a GitHub-hosted runner."""
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


class _Loader(yaml.SafeLoader):
    """Safe loader that rejects expensive input: deep nesting, merge keys and very large integers."""

    def fetch_flow_collection_start(self, token_class: Any) -> None:
        if self.flow_level >= MAX_DEPTH:
            raise yaml.scanner.ScannerError(None, None, "nested too deeply", self.get_mark())
        super().fetch_flow_collection_start(token_class)

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                raise yaml.constructor.ConstructorError(None, None, "merge keys are not supported", key.start_mark)
        super().flatten_mapping(node)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        number = super().construct_yaml_int(node)
        if number.bit_length() > MAX_BITS:
            raise yaml.constructor.ConstructorError(None, None, "the number is too large", node.start_mark)
        return number


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


def load_workflow(text: bytes) -> Any:
    """Parse YAML. Raise `ValueError` with the reason if it is invalid."""
    if len(text) > MAX_BYTES:
        raise ValueError(f"longer than {MAX_BYTES} bytes")
    try:
        # Derived from the safe loader.
        return yaml.load(text.decode("utf-8"), _Loader)  # noqa: S506
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except (yaml.YAMLError, OverflowError) as error:
        raise ValueError(str(error)) from None


def parse_workflow(document: Any, github: Mapping[str, str]) -> list[WorkflowJob]:
    """Return all jobs with the matrix expanded. Raise `UserError` with the key that is not supported."""
    workflow = _mapping(document, "the workflow")
    _only(workflow, _WORKFLOW_KEYS, "the workflow")
    env = _env(workflow.get("env"), "env", {"github": github})
    bodies = {_name(key, "jobs"): body for key, body in _mapping(workflow.get("jobs"), "jobs").items()}
    may_request_tokens = _may_request_tokens(workflow.get("permissions"), "permissions")
    jobs: list[WorkflowJob] = []
    for key, body in bodies.items():
        jobs += _expand(key, body, github, env, may_request_tokens=may_request_tokens)
        if len(jobs) > MAX_JOBS:
            raise _error("jobs", f"define more than {MAX_JOBS} jobs", f"use at most {MAX_JOBS}")
        if sum(len(job.steps) for job in jobs) > MAX_STEPS:
            raise _error("jobs", f"define more than {MAX_STEPS} steps", f"use at most {MAX_STEPS}")
    if not jobs:
        raise _error("jobs", "is empty", "add a job with runs-on and steps")
    for job in jobs:
        for need in job.needs:
            if need not in bodies:
                raise _error(f"jobs.{job.key}.needs", f"names {quote(need, MAX_SHOWN)}", "name a job of this workflow")
    _check_cycles(jobs)
    return jobs


def _error(where: str, what: str, fix: str) -> UserError:
    return UserError(f"{where} {what}", field=where, fix=fix)


def _mapping(value: Any, where: str) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        found = "empty" if value is None else f"a {type(value).__name__}, not a mapping"
        raise _error(where, f"is {found}", "see run-workflow in docs/reference/commands.md")
    return value


def _only(value: Mapping[Any, Any], known: frozenset[Hashable], where: str) -> None:
    for key in value:
        if key not in known:
            raise _error(where, f"has {quote(key, MAX_SHOWN)}, which run-workflow does not support", "remove it")


def _name(value: Any, where: str) -> str:
    """Validate a key, which is printed later."""
    name = str(value)
    if not name.isprintable() or not 0 < len(name) <= MAX_SHOWN:
        raise _error(where, f"has {quote(value, MAX_SHOWN)}", f"use a name of at most {MAX_SHOWN} printable characters")
    return name


def _as_list(value: Any) -> Sequence[Any]:
    """Return a list, also for a single value."""
    return value if isinstance(value, list) else [value]


def _may_request_tokens(value: Any, where: str) -> bool:
    """Whether permissions include `id-token: write`. By default, they do not."""
    if value is None or value == "read-all":
        return False
    if value == "write-all":
        return True
    levels = {_name(scope, where): _plain(level, where) for scope, level in _mapping(value, where).items()}
    for scope, level in levels.items():
        if level not in {"read", "write", "none"}:
            raise _error(f"{where}.{scope}", f"is {quote(level, MAX_SHOWN)}", "use read, write or none")
    return levels.get("id-token") == "write"


def _expand(
    key: str, body: Any, github: Mapping[str, str], env: Mapping[str, str], *, may_request_tokens: bool
) -> list[WorkflowJob]:
    where = f"jobs.{key}"
    job = _mapping(body, where)
    _only(job, _JOB_KEYS, where)
    strategy = _mapping(job.get("strategy", {}), f"{where}.strategy")
    matrix = _mapping(strategy.get("matrix", {}), f"{where}.strategy.matrix")
    for axis, values in matrix.items():
        if not isinstance(values, list) or axis in {"include", "exclude"}:
            raise _error(f"{where}.strategy.matrix.{_name(axis, where)}", "is not a list of values", "give a list")
    if math.prod(map(len, matrix.values())) > MAX_JOBS:
        raise _error(f"{where}.strategy.matrix", f"expands to more than {MAX_JOBS} jobs", f"use at most {MAX_JOBS}")
    axes = [[(_name(axis, where), value) for value in values] for axis, values in matrix.items()]
    if "permissions" in job:
        may_request_tokens = _may_request_tokens(job["permissions"], f"{where}.permissions")
    return [
        _job(key, job, github, env, dict(values), may_request_tokens=may_request_tokens)
        for values in itertools.product(*axes)
    ]


def _job(
    key: str,
    job: Mapping[Any, Any],
    github: Mapping[str, str],
    env: Mapping[str, str],
    matrix: Mapping[str, Any],
    *,
    may_request_tokens: bool,
) -> WorkflowJob:
    where = f"jobs.{key}"
    matrix = {axis: _plain(value, f"{where}.strategy.matrix") for axis, value in matrix.items()}
    scope: dict[str, Mapping[str, str]] = {"github": {**github, "job": key}, "matrix": matrix}
    env = {**env, **_env(job.get("env"), f"{where}.env", {**scope, "env": env})}
    scope["env"] = env
    needs = job.get("needs", [])
    labels = job.get("runs-on", [])
    steps = job.get("steps", [])
    if not labels:
        raise _error(f"{where}.runs-on", "is missing", "give ubuntu-latest or ${{ github.run_id }}")
    if not isinstance(steps, list) or not steps:
        raise _error(f"{where}.steps", "is missing", "give a list of run steps")
    if len(steps) > MAX_STEPS:
        raise _error(f"{where}.steps", f"has more than {MAX_STEPS} steps", f"use at most {MAX_STEPS}")
    suffix = f" ({', '.join(matrix.values())})" if matrix else ""
    return WorkflowJob(
        key=key,
        name=_text(job.get("name", key), scope, where) + suffix,
        needs=tuple(_plain(need, f"{where}.needs") for need in _as_list(needs)),
        labels=tuple(_text(label, scope, f"{where}.runs-on") for label in _as_list(labels)),
        condition=_condition(job.get("if"), where),
        steps=tuple(_step(step, scope, f"{where}.steps[{index}]") for index, step in enumerate(steps)),
        env=env,
        timeout_s=_timeout(job.get("timeout-minutes", DEFAULT_TIMEOUT_MIN), where) * 60,
        may_request_tokens=may_request_tokens,
        environment=_environment(job.get("environment"), scope, f"{where}.environment"),
    )


def _environment(value: Any, scope: Mapping[str, Mapping[str, str]], where: str) -> str:
    if isinstance(value, Mapping):
        _only(value, frozenset({"name", "url"}), where)
        value = value.get("name")
    return "" if value is None else _text(value, scope, where)


def _timeout(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1_440:
        raise _error(f"{where}.timeout-minutes", f"is {quote(value, MAX_SHOWN)}", "give minutes up to 1440")
    return float(value)


def _condition(value: Any, where: str) -> str:
    if value is None:
        return "success()"
    text = _plain(value, f"{where}.if").strip()
    if text.startswith(_OPEN) and text.endswith(_CLOSE):
        text = text.removeprefix(_OPEN).removesuffix(_CLOSE).strip()
    if text not in {"always()", "success()", "failure()"}:
        raise _error(f"{where}.if", f"is {quote(text, MAX_SHOWN)}", "use always(), success() or failure()")
    return text


def _step(value: Any, scope: Mapping[str, Mapping[str, str]], where: str) -> WorkflowStep:
    step = _mapping(value, where)
    if "uses" in step:
        raise _error(where, "uses an action; run-workflow supports only run steps", "replace it by a run step")
    _only(step, _STEP_KEYS, where)
    if not isinstance(step.get("run"), str):
        raise _error(where, "has no run", "give shell commands under run")
    env = _env(step.get("env"), f"{where}.env", scope)
    inner = {**scope, "env": {**scope["env"], **env}}
    return WorkflowStep(run=_text(step["run"], inner, where), name=_text(step.get("name", ""), inner, where), env=env)


def _env(value: Any, where: str, scope: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    if value is None:
        return {}
    return {_name(key, where): _text(item, scope, where) for key, item in _mapping(value, where).items()}


def _plain(value: Any, where: str) -> str:
    """Convert a scalar to text. Lists and mappings are rejected: with anchors, their text could become very long."""
    if not isinstance(value, str | int | float | date | None):
        raise _error(where, f"has a {type(value).__name__} in place of a text", "use a text or a number")
    text = str(value)
    if len(text) > MAX_TEXT:
        raise _error(where, f"is longer than {MAX_TEXT} characters", "shorten it")
    return text


_OPEN, _CLOSE = "${{", "}}"


def _text(value: Any, scope: Mapping[str, Mapping[str, str]], where: str) -> str:
    """Resolve the expressions in one pass; the results are not evaluated again."""
    first, *rest = _plain(value, where).split(_OPEN)
    parts, length = [first], len(first)
    for part in rest:
        expression, closed, after = part.partition(_CLOSE)
        parts += [_resolved(expression, scope, where), after] if closed else [_OPEN, part]
        length += len(parts[-2]) + len(parts[-1])
        if length > MAX_TEXT:
            raise _error(where, f"is longer than {MAX_TEXT} characters", "shorten it")
    return "".join(parts)


def _resolved(expression: str, scope: Mapping[str, Mapping[str, str]], where: str) -> str:
    context, _, name = expression.strip().partition(".")
    values = scope.get(context)
    if values is None or name not in values:
        known = "github.run_id, github.run_attempt, github.repository, github.workflow_ref, github.job, matrix.*, env.*"
        raise _error(where, f"has {quote(_OPEN + expression + _CLOSE, MAX_SHOWN)}", f"use one of {known}")
    return values[name]


def _check_cycles(jobs: Sequence[WorkflowJob]) -> None:
    waiting = {job.key: set(job.needs) for job in jobs}
    while waiting:
        free = [key for key, needs in waiting.items() if not needs & waiting.keys()]
        if not free:
            raise _error("jobs", f"wait for each other: {', '.join(sorted(waiting))}", "remove the cycle of needs")
        for key in free:
            del waiting[key]
