"""Parser for the subset of GitHub's workflow syntax that `run-workflow` supports. Pure.

It collects everything that is not supported, so that a file is rejected once with all of its problems.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from typing import Any, NamedTuple

import yaml

from remuda.cli.step_commands import runs_remuda
from remuda.domain.errors import UserError
from remuda.domain.text import nearest, quote, suggest
from remuda.fake_github.client import JobStep
from remuda.fake_github.fake_runner.expressions import (
    STATUS_FUNCTIONS,
    ExpressionError,
    Node,
    Scope,
    evaluate,
    parse_condition,
    parse_template,
    render,
    to_number,
    to_text,
)
from remuda.fake_github.fake_runner.worker import SHELLS
from remuda.source_repository import documentation

MAX_JOBS = 256
#: Maximum number of steps of all jobs together, after the expansion of the matrix.
MAX_STEPS = 2_000
#: Maximum length of a text.
MAX_TEXT = 128 * 1024
MAX_BYTES = 256 * 1024
#: Maximum length of a name, and of a value quoted in an error.
MAX_SHOWN = 80
#: Maximum number of problems in an error.
MAX_PROBLEMS = 50
#: Maximum nesting depth of flow collections; the scanner slows down with each level.
MAX_DEPTH = 50
#: Maximum size of an integer.
MAX_BITS = 64
DEFAULT_TIMEOUT_MIN = 60.0
MAX_TIMEOUT_MIN = 1_440.0
#: The page that lists what a workflow may contain.
SYNTAX_PAGE = "docs/reference/commands.md#run-workflow"

_WORKFLOW_KEYS = frozenset(
    {"name", "run-name", "on", "env", "defaults", "jobs", "permissions", "concurrency"},
)
_JOB_KEYS = frozenset(
    {
        *("name", "needs", "runs-on", "strategy", "if", "steps", "env", "timeout-minutes", "permissions"),
        *("environment", "outputs", "continue-on-error", "defaults", "concurrency"),
    }
)
_STEP_KEYS = frozenset(
    {
        *("name", "run", "uses", "with", "env", "id", "if", "shell", "working-directory"),
        *("continue-on-error", "timeout-minutes"),
    }
)
#: Why well-known keys are not supported, and what to do instead.
_REASONS = {
    "services": ("needs containers, which local machines do not have", "start the service in a step"),
    "container": ("needs containers, which local machines do not have", "remove it and run the steps directly"),
    "uses": ("calls another workflow", "copy its jobs into this file"),
    "secrets": ("passes secrets, and there are none here", "set env instead"),
}
#: https://docs.github.com/actions/reference/workflow-syntax-for-github-actions#jobsjob_id
_JOB_ID = re.compile(rf"[A-Za-z_][A-Za-z0-9_-]{{0,{MAX_SHOWN - 1}}}")
_CHECKOUT = re.compile(r"actions/checkout@\S+")
_CHECKOUT_INPUTS = frozenset({"fetch-depth", "path"})
#: Inputs of actions/checkout that make no difference here.
_IGNORED_INPUTS = frozenset({"persist-credentials", "clean", "show-progress", "fetch-tags", "set-safe-directory"})

#: Properties of the github context; the runner adds those of the second line.
GITHUB_PROPERTIES = frozenset(
    {
        *("run_id", "run_attempt", "run_number", "repository", "sha", "ref", "ref_name", "ref_type", "head_ref"),
        *("base_ref", "event_name", "actor", "triggering_actor", "workflow", "workflow_ref"),
        *("job", "workspace", "api_url", "server_url", "repository_owner"),
    }
)
#: https://docs.github.com/actions/reference/workflows-and-actions/contexts#context-availability
_WORKFLOW_CONTEXTS = frozenset({"github"})
_IF_CONTEXTS = frozenset({"github", "needs"})
_NAME_CONTEXTS = frozenset({"github", "strategy", "matrix"})
_JOB_CONTEXTS = _NAME_CONTEXTS | {"needs"}
_STEP_CONTEXTS = _JOB_CONTEXTS | {"job", "runner", "env", "steps"}
_ABSENT_CONTEXTS = {
    "secrets": "use env: there are no secrets here",
    "vars": "use env: there are no configuration variables here",
    "inputs": "write the value: the workflow has no inputs here",
}


class FilePlace(NamedTuple):
    """A place in the file: its path, such as jobs.test.steps[0], and its line if known."""

    path: str = ""
    line: int = 0

    def child(self, container: object, key: Any) -> FilePlace:
        name = str(key) if str(key).isprintable() else repr(str(key))
        suffix = f"[{key}]" if isinstance(container, list) else f".{name}" if self.path else name
        return FilePlace(self.path + suffix[: MAX_SHOWN + 1], getattr(container, "lines", {}).get(key, self.line))


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkflowProblem:
    place: FilePlace
    what: str
    fix: str

    def __str__(self) -> str:
        line = f"line {self.place.line}: " if self.place.line else ""
        return f"{line}{self.place.path} {self.what}; {self.fix}"


class WorkflowError(UserError):
    """The workflow cannot run. It names all problems."""

    def __init__(self, problems: Sequence[WorkflowProblem]) -> None:
        first = problems[0]
        if len(problems) == 1:
            line = f"line {first.place.line}: " if first.place.line else ""
            super().__init__(f"{line}{first.place.path} {first.what}", field=first.place.path, fix=first.fix)
        else:
            more = "" if len(problems) <= MAX_PROBLEMS else f", the first {MAX_PROBLEMS} are listed"
            super().__init__(
                f"the workflow has {len(problems)} problems{more}",
                field="FILE",
                fix=f"correct them; {documentation(SYNTAX_PAGE)} lists what is supported",
                details=[str(problem) for problem in problems[:MAX_PROBLEMS]],
            )
        self.problems = tuple(problems)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkflowJob:
    """One job of the expanded matrix. Its texts may contain expressions."""

    key: str
    #: Without expressions.
    name: str
    needs: tuple[str, ...]
    #: The labels of runs-on.
    labels: tuple[str, ...]
    condition: Node
    steps: tuple[JobStep, ...]
    #: Of the workflow and of the job, in this order.
    env: tuple[Mapping[str, str], ...] = ()
    outputs: Mapping[str, str] = field(default_factory=dict)
    matrix: Mapping[str, Any] = field(default_factory=dict)
    strategy: Mapping[str, Any] = field(default_factory=dict)
    timeout_min: str = ""
    continue_on_error: str = ""
    #: Whether its steps may request OIDC tokens (`permissions: id-token: write`).
    may_request_tokens: bool = False
    #: The deployment environment, or an empty text.
    environment: str = ""

    @property
    def checks_out(self) -> bool:
        return any(step.uses for step in self.steps)

    @property
    def provisions(self) -> bool:
        """Whether a step of the job runs `remuda provision`."""
        return any(runs_remuda(step.run, "provision") for step in self.steps)

    def resolve(self, github: Mapping[str, str], needs: Mapping[str, Any]) -> ResolvedJob:
        """Evaluate the job's own expressions. Those of its steps are evaluated by the runner."""
        contexts = {
            "github": {**github, "job": self.key},
            "needs": needs,
            "matrix": self.matrix,
            "strategy": self.strategy,
        }
        scope = Scope(contexts)
        try:
            timeout_min = to_number(render(self.timeout_min, scope)) or DEFAULT_TIMEOUT_MIN
            labels = tuple(_labels(self.labels, scope))
            _check_labels(self.labels, labels)
            return ResolvedJob(
                job=self,
                labels=labels,
                env={name: render(value, scope) for env in self.env for name, value in env.items()},
                environment=render(self.environment, scope),
                timeout_s=min(timeout_min, MAX_TIMEOUT_MIN) * 60,
                continues_on_error=render(self.continue_on_error, scope) == "true",
                contexts=contexts,
            )
        except ExpressionError as error:
            raise UserError(f"jobs.{self.key}: {error}", field=f"jobs.{self.key}", fix="correct the file") from None


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedJob:
    """A job that is about to run."""

    job: WorkflowJob
    labels: tuple[str, ...]
    env: Mapping[str, str]
    environment: str
    timeout_s: float
    continues_on_error: bool
    #: Contexts for the expressions of its steps.
    contexts: Mapping[str, Any]

    @property
    def name(self) -> str:
        return self.job.name

    @property
    def hosted(self) -> bool:
        """Whether the job runs on this machine in place of a GitHub-hosted runner."""
        return any(label.startswith("ubuntu-") for label in self.labels)


def _labels(templates: Sequence[str], scope: Scope) -> Iterator[str]:
    """The labels of runs-on. An expression may yield a list."""
    for template in templates:
        match parse_template(template):
            case ["", Node() as expression, ""]:
                value = evaluate(expression, scope)
                yield from map(to_text, value) if isinstance(value, list) else [to_text(value)]
            case _:
                yield render(template, scope)


def _check_labels(written: Sequence[str], labels: Sequence[str]) -> None:
    """No runner has an empty label, so a job with one would wait for ever."""
    if not all(label.strip() for label in labels):
        raise ExpressionError(f"runs-on is {quote(' '.join(written), MAX_SHOWN)}, which is an empty label in this run")


# YAML ---------------------------------------------------------------------------------------------------------------


class LocatedMapping(dict[Any, Any]):
    """A mapping with the line of each key."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[Any, int] = {}


class LocatedList(list[Any]):
    """A list with the line of each item."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[int, int] = {}


class _Loader(yaml.SafeLoader):
    """Safe loader for the scalars of YAML 1.2, as on GitHub: `on` and `12:30` are texts.

    It rejects expensive input (deep nesting, very large integers), and keys that are defined twice.
    """

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - declared by the base class

    def fetch_flow_collection_start(self, token_class: Any) -> None:
        if self.flow_level >= MAX_DEPTH:
            raise yaml.scanner.ScannerError(None, None, "nested too deeply", self.get_mark())
        super().fetch_flow_collection_start(token_class)

    def construct_located_mapping(self, node: yaml.MappingNode) -> Iterator[LocatedMapping]:
        made = LocatedMapping()
        yield made
        for key_node, value_node in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str | int | float | None) or key in made:
                problem = "is defined twice" if isinstance(key, str | int | float | None) else "is no text"
                shown = f"the key {quote(key, MAX_SHOWN)} {problem}"
                raise yaml.constructor.ConstructorError(None, None, shown, key_node.start_mark)
            made.lines[key] = key_node.start_mark.line + 1
            made[key] = self.construct_object(value_node, deep=True)

    def construct_located_list(self, node: yaml.SequenceNode) -> Iterator[LocatedList]:
        made = LocatedList()
        yield made
        for index, item in enumerate(node.value):
            made.lines[index] = item.start_mark.line + 1
            made.append(self.construct_object(item, deep=True))

    def construct_integer(self, node: yaml.ScalarNode) -> int:
        text = str(node.value)
        number = int(text, 0) if text[:2] in {"0x", "0o"} else int(text)
        if number.bit_length() > MAX_BITS:
            raise yaml.constructor.ConstructorError(None, None, "the number is too large", node.start_mark)
        return number


for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?", "-+0123456789."),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), list(_first))
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_integer)
_Loader.add_constructor("tag:yaml.org,2002:map", _Loader.construct_located_mapping)
_Loader.add_constructor("tag:yaml.org,2002:seq", _Loader.construct_located_list)


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


# Workflow -----------------------------------------------------------------------------------------------------------


def parse_workflow(document: Any, github: Mapping[str, str]) -> list[WorkflowJob]:
    """Return all jobs with the matrix expanded. Raise `WorkflowError` with everything that is not supported."""
    parser = _WorkflowParser(github)
    jobs = parser.parse(document)
    if parser.problems:
        raise WorkflowError(parser.problems)
    return jobs


class _WorkflowParser:
    def __init__(self, github: Mapping[str, str]) -> None:
        self._github = github
        self.problems: list[WorkflowProblem] = []

    def parse(self, document: Any) -> list[WorkflowJob]:
        root = FilePlace("the workflow", 1)
        workflow = self._mapping(document, root)
        if not workflow:
            return []
        top = FilePlace()
        self._only(workflow, _WORKFLOW_KEYS, top)
        env = self._texts(workflow, "env", top, _WORKFLOW_CONTEXTS)
        defaults = self._defaults(workflow, top, {})
        may_request_tokens = self._may_request_tokens(workflow, top, default=False)
        where = top.child(workflow, "jobs")
        bodies = self._mapping(workflow.get("jobs"), where)
        jobs: list[WorkflowJob] = []
        for key, body in bodies.items():
            place = where.child(bodies, key)
            if not _JOB_ID.fullmatch(str(key)):
                self._add(place, "is no id of a job", "use letters, digits, '-' and '_', and begin with a letter")
                continue
            job = self._mapping(body, place)
            if job:
                allowed = self._may_request_tokens(job, place, default=may_request_tokens)
                jobs += self._expand(key, job, place, env, defaults, may_request_tokens=allowed)
            if len(jobs) > MAX_JOBS or sum(len(each.steps) for each in jobs) > MAX_STEPS:
                self._add(where, "are too many", f"use at most {MAX_JOBS} jobs and {MAX_STEPS} steps")
                break
        if not bodies and isinstance(workflow.get("jobs"), Mapping):
            self._add(where, "is empty", "add a job with runs-on and steps")
        self._check_cycles(bodies, jobs, where)
        return jobs

    # Problems

    def _add(self, place: FilePlace, what: str, fix: str) -> None:
        problem = WorkflowProblem(place=place, what=what, fix=fix)
        # A matrix repeats the problems of its job.
        if problem not in self.problems:
            self.problems.append(problem)

    def _mapping(self, value: Any, place: FilePlace) -> Mapping[Any, Any]:
        if isinstance(value, Mapping):
            return value
        found = "empty" if value is None else f"a {type(value).__name__.removeprefix('Located').lower()}, not a mapping"
        self._add(place, f"is {found}", f"see {documentation(SYNTAX_PAGE)}")
        return {}

    def _only(self, value: Mapping[Any, Any], known: Collection[str], place: FilePlace) -> None:
        for key in value:
            if key not in known:
                near = nearest(str(key), known, cutoff=0.7)
                default = ("is an unknown key", f"did you mean {near}?") if near else ("is not supported", "remove it")
                reason, fix = _REASONS.get(str(key), default)
                self._add(place.child(value, key), reason, fix)

    def _is_name(self, value: Any, place: FilePlace) -> bool:
        """Whether a key can be printed later."""
        name = str(value)
        if name.isprintable() and 0 < len(name) <= MAX_SHOWN:
            return True
        self._add(place, "has an invalid name", f"use at most {MAX_SHOWN} printable characters")
        return False

    # Values

    def _plain(self, value: Any, place: FilePlace) -> str:
        """Convert a scalar to text. Lists and mappings are rejected: with anchors, their text could be very long."""
        if not isinstance(value, str | int | float | None):
            self._add(place, "is not a text or a number", "use a text or a number")
            return ""
        text = to_text(value)
        if len(text) > MAX_TEXT:
            self._add(place, f"is longer than {MAX_TEXT} characters", "shorten it")
            return ""
        return text

    def _text(self, value: Any, place: FilePlace, contexts: Collection[str], needs: Collection[str] = ()) -> str:
        """A text whose expressions are valid."""
        text = self._plain(value, place)
        try:
            parts = parse_template(text)
        except ExpressionError as error:
            self._add(place, f"has an invalid expression: {error}", f"see {documentation(SYNTAX_PAGE)}")
            return ""
        for part in parts:
            if isinstance(part, Node):
                self._check_expression(part, place, contexts, needs, has_status=False)
        return text

    def _check_expression(
        self, node: Node, place: FilePlace, contexts: Collection[str], needs: Collection[str], *, has_status: bool
    ) -> None:
        for each in node.walk():
            match each:
                case Node("context", name) if has_status and name in STATUS_FUNCTIONS:
                    self._add(place, f"names {name}, a function", f"write {name}()")
                case Node("context", name) if name not in contexts:
                    known = f"use one of {', '.join(sorted(contexts))}"
                    self._add(place, f"uses {name}, which it cannot", _ABSENT_CONTEXTS.get(name, known))
                case Node("call", name, ()) if not has_status and name in {"success", "failure", "always", "cancelled"}:
                    self._add(place, f"calls {name}()", "use it in an if")
                case Node("index", _, (Node("context", "github"), Node("literal", str() as name))):
                    if name.lower() not in GITHUB_PROPERTIES:
                        fix = suggest(name.lower(), sorted(GITHUB_PROPERTIES))
                        self._add(place, f"uses github.{name}, which does not exist here", fix)
                case Node("index", _, (Node("context", "needs"), Node("literal", str() as name))):
                    if "needs" in contexts and name.lower() not in {need.lower() for need in needs}:
                        self._add(place, f"uses needs.{name}, but the job does not need {name}", f"add {name} to needs")

    def _condition(self, value: Any, place: FilePlace, contexts: Collection[str], needs: Collection[str]) -> str:
        text = self._plain(value, place)
        try:
            self._check_expression(parse_condition(text), place, contexts, needs, has_status=True)
        except ExpressionError as error:
            self._add(place, f"is no valid condition: {error}", f"see {documentation(SYNTAX_PAGE)}")
            return ""
        return text

    def _texts(
        self,
        container: Mapping[Any, Any],
        key: str,
        place: FilePlace,
        contexts: Collection[str],
        needs: Collection[str] = (),
    ) -> dict[str, str]:
        """A mapping of texts, such as env."""
        if container.get(key) is None:
            return {}
        where = place.child(container, key)
        values = self._mapping(container[key], where)
        return {
            str(name): self._text(value, where.child(values, name), contexts, needs)
            for name, value in values.items()
            if self._is_name(name, where.child(values, name))
        }

    def _boolean(
        self,
        container: Mapping[Any, Any],
        key: str,
        place: FilePlace,
        contexts: Collection[str],
        needs: Collection[str],
    ) -> str:
        where = place.child(container, key)
        text = self._text(container.get(key), where, contexts, needs)
        if text not in {"", "true", "false"} and "${{" not in text:
            self._add(where, f"is {quote(text, MAX_SHOWN)}", "use true or false")
        return text

    def _minutes(
        self, container: Mapping[Any, Any], place: FilePlace, contexts: Collection[str], needs: Collection[str]
    ) -> str:
        where = place.child(container, "timeout-minutes")
        text = self._text(container.get("timeout-minutes"), where, contexts, needs)
        if text and "${{" not in text and not 0 < to_number(text) <= MAX_TIMEOUT_MIN:
            self._add(where, f"is {quote(text, MAX_SHOWN)}", f"give minutes up to {MAX_TIMEOUT_MIN:g}")
        return text

    def _defaults(
        self, container: Mapping[Any, Any], place: FilePlace, outer: Mapping[str, str], needs: Collection[str] = ()
    ) -> Mapping[str, str]:
        """The default shell and working directory of run steps."""
        if container.get("defaults") is None:
            return outer
        where = place.child(container, "defaults")
        values = self._mapping(container["defaults"], where)
        self._only(values, {"run"}, where)
        if "run" not in values:
            return outer
        run = self._mapping(values["run"], where.child(values, "run"))
        self._only(run, {"shell", "working-directory"}, where.child(values, "run"))
        return {**outer, **self._texts(values, "run", where, _JOB_CONTEXTS | {"env"}, needs)}

    def _may_request_tokens(self, container: Mapping[Any, Any], place: FilePlace, *, default: bool) -> bool:
        """Whether permissions include `id-token: write`."""
        if "permissions" not in container:
            return default
        where, value = place.child(container, "permissions"), container["permissions"]
        if value is None or value == "read-all":
            return False
        if value == "write-all":
            return True
        levels = self._mapping(value, where)
        for scope, level in levels.items():
            if level not in {"read", "write", "none"}:
                self._add(where.child(levels, scope), f"is {quote(level, MAX_SHOWN)}", "use read, write or none")
        return levels.get("id-token") == "write"

    # Jobs

    def _expand(
        self,
        key: str,
        job: Mapping[Any, Any],
        place: FilePlace,
        env: Mapping[str, str],
        defaults: Mapping[str, str],
        *,
        may_request_tokens: bool,
    ) -> list[WorkflowJob]:
        self._only(job, _JOB_KEYS, place)
        needs_place = place.child(job, "needs")
        needs = tuple(self._plain(need, needs_place) for need in _as_list(job.get("needs", [])))
        if not job.get("runs-on") and "uses" not in job:
            fix = "give ubuntu-latest or ${{ github.run_id }}"
            self._add(place.child(job, "runs-on"), "is missing", fix)
        strategy, combinations = self._matrix(job, place)
        defaults = self._defaults(job, place, defaults, needs)
        steps = self._steps(job, place, defaults, needs)
        condition = self._condition(job.get("if"), place.child(job, "if"), _IF_CONTEXTS, needs)
        shared: dict[str, Any] = {
            "key": key,
            "needs": needs,
            "labels": self._runs_on(job, place, needs),
            "condition": parse_condition(condition),
            "steps": steps,
            "env": (env, self._texts(job, "env", place, _JOB_CONTEXTS, needs)),
            "outputs": self._texts(job, "outputs", place, _STEP_CONTEXTS, needs),
            "timeout_min": self._minutes(job, place, _JOB_CONTEXTS, needs),
            "continue_on_error": self._boolean(job, "continue-on-error", place, _JOB_CONTEXTS, needs),
            "may_request_tokens": may_request_tokens,
            "environment": self._environment(job, place, needs),
        }
        name = self._text(job.get("name") or key, place.child(job, "name"), _NAME_CONTEXTS)
        jobs = []
        for index, values in enumerate(combinations):
            facts = {**strategy, "job-index": index, "job-total": len(combinations)}
            shown = self._job_name(name, values, facts, key, place)
            jobs.append(WorkflowJob(name=shown, matrix=values, strategy=facts, **shared))
        return jobs

    def _job_name(
        self, template: str, matrix: Mapping[str, Any], strategy: Mapping[str, Any], key: str, place: FilePlace
    ) -> str:
        """The name of a job. As on GitHub, the values of the matrix follow unless the name uses them."""
        contexts = {"github": {**self._github, "job": key}, "matrix": matrix, "strategy": strategy}
        try:
            name = render(template, Scope(contexts))
        except ExpressionError as error:
            # An unknown context was reported before.
            if not self.problems:
                self._add(place, f"has an invalid name: {error}", "correct it")
            return key
        has_values = "matrix." in template
        return name if has_values or not matrix else f"{name} ({', '.join(map(to_text, matrix.values()))})"

    def _runs_on(self, job: Mapping[Any, Any], place: FilePlace, needs: Collection[str]) -> tuple[str, ...]:
        where, value = place.child(job, "runs-on"), job.get("runs-on")
        if isinstance(value, Mapping):
            self._only(value, {"labels"}, where)
            where, value = where.child(value, "labels"), value.get("labels")
        labels = _as_list(value)
        for index, label in enumerate(labels):
            # A job without any label is reported as one without runs-on.
            if not str(label or "").strip() and job.get("runs-on"):
                at = where.child(labels, index) if isinstance(value, list) else where
                self._add(
                    at, f"is {quote(label or '', MAX_SHOWN)}", "give the label of a runner, such as ubuntu-latest"
                )
        return tuple(self._text(label, where, _JOB_CONTEXTS, needs) for label in labels)

    def _environment(self, job: Mapping[Any, Any], place: FilePlace, needs: Collection[str]) -> str:
        where, value = place.child(job, "environment"), job.get("environment")
        if isinstance(value, Mapping):
            self._only(value, {"name", "url"}, where)
            where, value = where.child(value, "name"), value.get("name")
        return self._text(value, where, _JOB_CONTEXTS, needs)

    def _matrix(self, job: Mapping[Any, Any], place: FilePlace) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The facts of the strategy, and the combinations of the matrix."""
        if job.get("strategy") is None:
            return {}, [{}]
        where = place.child(job, "strategy")
        strategy = self._mapping(job["strategy"], where)
        self._only(strategy, {"matrix", "fail-fast"}, where)
        facts = {"fail-fast": strategy.get("fail-fast", True)}
        if strategy.get("matrix") is None:
            return facts, [{}]
        where = where.child(strategy, "matrix")
        if isinstance(strategy["matrix"], str):
            self._add(where, "is an expression", "write its values as lists")
            return facts, [{}]
        matrix = self._mapping(strategy["matrix"], where)
        axes: dict[str, list[Any]] = {}
        for axis, values in matrix.items():
            at = where.child(matrix, axis)
            if axis in {"include", "exclude"}:
                continue
            if not isinstance(values, list) or not all(isinstance(item, str | int | float) for item in values):
                self._add(at, "is not a list of texts and numbers", "give a list")
            elif self._is_name(axis, at):
                axes[axis] = values
        if math.prod(map(len, axes.values())) > MAX_JOBS:
            self._add(where, f"expands to more than {MAX_JOBS} jobs", f"use at most {MAX_JOBS}")
            return facts, [{}]
        include = self._entries(matrix, "include", where)
        exclude = self._entries(matrix, "exclude", where)
        return facts, _combinations(axes, include, exclude) or [{}]

    def _entries(self, matrix: Mapping[Any, Any], key: str, place: FilePlace) -> list[dict[str, Any]]:
        where, entries = place.child(matrix, key), matrix.get(key) or []
        valid = isinstance(entries, list) and all(
            isinstance(entry, Mapping) and all(isinstance(item, str | int | float) for item in entry.values())
            for entry in entries
        )
        if not valid or len(entries) > MAX_JOBS:
            self._add(where, "is not a list of mappings with texts and numbers", "give a list of mappings")
            return []
        return [{str(name): value for name, value in entry.items()} for entry in entries]

    # Steps

    def _steps(
        self, job: Mapping[Any, Any], place: FilePlace, defaults: Mapping[str, str], needs: Collection[str]
    ) -> tuple[JobStep, ...]:
        where, steps = place.child(job, "steps"), job.get("steps")
        if not isinstance(steps, list) or not steps:
            if "uses" not in job:
                what = "is not a list" if steps else "is missing"
                self._add(where, what, "give a list of steps, each of which begins with '- '")
            return ()
        if len(steps) > MAX_STEPS:
            self._add(where, f"has more than {MAX_STEPS} steps", f"use at most {MAX_STEPS}")
            return ()
        return tuple(self._step(step, where.child(steps, index), defaults, needs) for index, step in enumerate(steps))

    def _step(self, value: Any, place: FilePlace, defaults: Mapping[str, str], needs: Collection[str]) -> JobStep:
        step = self._mapping(value, place)
        self._only(step, _STEP_KEYS, place)

        def text(key: str, default: str = "") -> str:
            return self._text(step.get(key, default), place.child(step, key), _STEP_CONTEXTS, needs)

        uses = ""
        if "uses" in step:
            uses = self._plain(step["uses"], place.child(step, "uses"))
            self._check_action(uses, step, place)
        elif step and not isinstance(step.get("run"), str):
            self._add(place, "has neither run nor uses", "give shell commands under run")
        elif "with" in step:
            self._add(place.child(step, "with"), "is for actions, and the step runs commands", "set env instead")
        shell = text("shell", defaults.get("shell", ""))
        if shell not in SHELLS and "${{" not in shell:
            names = ", ".join(name for name in SHELLS if name)
            self._add(place.child(step, "shell"), f"is {quote(shell, MAX_SHOWN)}", f"use one of {names}")
        return JobStep(
            id=self._plain(step.get("id"), place.child(step, "id")),
            name=text("name") or None,
            run=text("run"),
            uses=uses,
            inputs=self._texts(step, "with", place, _STEP_CONTEXTS, needs) if uses else {},
            env=self._texts(step, "env", place, _STEP_CONTEXTS, needs),
            condition=self._condition(step.get("if"), place.child(step, "if"), _STEP_CONTEXTS, needs),
            shell="" if uses else shell,
            working_directory="" if uses else text("working-directory", defaults.get("working-directory", "")),
            continue_on_error=self._boolean(step, "continue-on-error", place, _STEP_CONTEXTS, needs),
            timeout_minutes=self._minutes(step, place, _STEP_CONTEXTS, needs),
        )

    def _check_action(self, uses: str, step: Mapping[Any, Any], place: FilePlace) -> None:
        where = place.child(step, "uses")
        if not _CHECKOUT.fullmatch(uses):
            fix = "replace it by a run step; actions/checkout is supported"
            if uses.partition("@")[0].endswith("/remuda"):
                fix = "run the command with the inputs as options, as in run: remuda provision --instance-count 2"
            self._add(where, f"names the action {quote(uses, MAX_SHOWN)}, which cannot run here", fix)
            return
        where, inputs = place.child(step, "with"), step.get("with")
        if isinstance(inputs, Mapping):
            self._only(inputs, _CHECKOUT_INPUTS | _IGNORED_INPUTS, where)

    def _check_cycles(self, bodies: Mapping[Any, Any], jobs: Sequence[WorkflowJob], place: FilePlace) -> None:
        for job in jobs:
            for need in job.needs:
                if need not in bodies:
                    where = place.child(bodies, job.key)
                    self._add(
                        where.child(bodies[job.key], "needs"),
                        f"names {quote(need, MAX_SHOWN)}, which does not exist",
                        "name a job of this workflow",
                    )
        try:
            TopologicalSorter({job.key: job.needs for job in jobs}).prepare()
        except CycleError as error:
            names = ", ".join(sorted(set(error.args[1])))
            self._add(place, f"wait for each other: {names}", "remove the cycle of needs")


def _as_list(value: Any) -> Sequence[Any]:
    """Return a list, also for a single value."""
    return value if isinstance(value, list) else [] if value is None else [value]


def _combinations(
    axes: Mapping[str, Sequence[Any]], include: Sequence[Mapping[str, Any]], exclude: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Expand a matrix.

    https://docs.github.com/actions/how-tos/write-workflows/choose-what-workflows-do/run-job-variations
    """
    product = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())] if axes else []
    kept = [
        values
        for values in product
        if not any(entry and all(values.get(name) == item for name, item in entry.items()) for entry in exclude)
    ]
    added: list[dict[str, Any]] = []
    extended = [dict(values) for values in kept]
    for entry in include:
        # It extends the combinations whose original values it does not change, or becomes a new one.
        fitting = [
            index
            for index, values in enumerate(kept)
            if all(values[name] == item for name, item in entry.items() if name in values)
        ]
        for index in fitting:
            extended[index] |= entry
        if not fitting:
            added.append(dict(entry))
    return extended + added
