"""The values that the steps of a job use and set: contexts, environment, outputs, path and summary.

Steps set values by writing to files (https://docs.github.com/actions/reference/workflows-and-actions/workflow-commands#environment-files).
Sources: Runner.Worker/FileCommandManager.cs, Runner.Worker/StepsRunner.cs.
"""

import os
import pathlib
from collections.abc import Mapping
from typing import Any

from .expressions import CaseSensitive, ExpressionError, Scope, is_met, parse_condition, render

#: Limits of a step's summary and of a job's outputs, as on GitHub.
MAX_SUMMARY_BYTES = 1024 * 1024
MAX_OUTPUTS_CHARS = 1024 * 1024
#: Maximum bytes of one of the other files.
MAX_FILE_BYTES = 4 * 1024 * 1024
FILES = {"GITHUB_OUTPUT": "set_output", "GITHUB_ENV": "set_env", "GITHUB_PATH": "add_path"}
SUMMARY_VARIABLE = "GITHUB_STEP_SUMMARY"
#: Runner.Worker/FileCommandManager.cs, SetEnvFileCommand.
BLOCKED_VARIABLES = frozenset({"NODE_OPTIONS"})


class FileCommandError(ValueError):
    """A step wrote an invalid line to one of its files."""


class JobContext:
    def __init__(self, job: Mapping[str, Any], *, github: Mapping[str, Any], runner: Mapping[str, Any]) -> None:
        given = job.get("contexts") or {}
        self.github = {**github, **given.get("github", {})}
        self._contexts: dict[str, Any] = {
            "needs": {},
            "matrix": {},
            "strategy": {},
            **given,
            "github": self.github,
            "runner": runner,
        }
        self.env = CaseSensitive({str(name): str(value) for name, value in job["env"].items()})
        #: Folders that steps have added to PATH, the last one first.
        self.paths: list[str] = []
        self.summary = ""
        self.failed = False
        self.cancelled = False
        self._steps: dict[str, dict[str, Any]] = {}

    @property
    def status(self) -> str:
        return "cancelled" if self.cancelled else "failure" if self.failed else "success"

    def scope(self, env: Mapping[str, str]) -> Scope:
        contexts = {
            **self._contexts,
            "env": CaseSensitive(env),
            "steps": self._steps,
            "job": {"status": self.status},
        }
        status = {
            "always": lambda: True,
            "success": lambda: self.status == "success",
            "failure": lambda: self.status == "failure",
            "cancelled": lambda: self.cancelled,
        }
        return Scope(contexts, status)

    def step_env(self, step: Mapping[str, Any]) -> dict[str, str]:
        """The variables of the workflow, of earlier steps and of this step."""
        scope = self.scope(self.env)
        return {**self.env, **{name: render(str(value), scope) for name, value in (step.get("env") or {}).items()}}

    def is_due(self, step: Mapping[str, Any], env: Mapping[str, str]) -> bool:
        return is_met(parse_condition(str(step.get("if") or "")), self.scope(env))

    def record_step(
        self, step: Mapping[str, Any], *, outcome: str, conclusion: str, outputs: Mapping[str, str]
    ) -> None:
        self.failed = self.failed or conclusion == "failure"
        if step.get("id"):
            self._steps[step["id"]] = {"outputs": dict(outputs), "outcome": outcome, "conclusion": conclusion}

    def job_outputs(self, templates: Mapping[str, str]) -> dict[str, str]:
        scope = self.scope(self.env)
        outputs = {name: render(template, scope) for name, template in templates.items()}
        if sum(map(len, outputs.values())) > MAX_OUTPUTS_CHARS:
            raise ExpressionError(f"the outputs of the job are longer than {MAX_OUTPUTS_CHARS} characters")
        return outputs


class StepCommandFiles:
    """The files of one step, and the values in them when the step has ended."""

    def __init__(self, folder: pathlib.Path, number: int) -> None:
        folder.mkdir(exist_ok=True)
        self.variables = {name: str(folder / f"{name.lower()}_{number}") for name in (*FILES, SUMMARY_VARIABLE)}
        self.outputs: dict[str, str] = {}
        for path in self.variables.values():
            pathlib.Path(path).touch()

    def apply(self, context: JobContext) -> None:
        """Apply what the step has written. Raises `FileCommandError` at the first invalid file."""
        self.outputs = _pairs(self._read("GITHUB_OUTPUT", MAX_FILE_BYTES))
        for name, value in _pairs(self._read("GITHUB_ENV", MAX_FILE_BYTES)).items():
            if name.upper() in BLOCKED_VARIABLES:
                raise FileCommandError(f"Can't store {name} output parameter using '$GITHUB_ENV' command.")
            context.env[name] = value
        for line in self._read("GITHUB_PATH", MAX_FILE_BYTES).splitlines():
            if line:
                context.paths = [line, *(path for path in context.paths if path != line)]
        context.summary += self._read(SUMMARY_VARIABLE, MAX_SUMMARY_BYTES)

    def _read(self, variable: str, limit: int) -> str:
        try:
            # The step may have replaced the file by a pipe, which would block.
            descriptor = os.open(self.variables[variable], os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            with os.fdopen(descriptor, "rb") as file:
                data = file.read(limit + 1) or b""
        except OSError:
            return ""
        if len(data) > limit:
            raise FileCommandError(f"${variable} supports content up to a size of {limit // 1024}k.")
        return data.decode("utf-8-sig", errors="replace")


def _pairs(text: str) -> dict[str, str]:
    """Parse lines `name=value`, and `name<<end` with a value of several lines up to `end`."""
    values: dict[str, str] = {}
    lines = iter(text.replace("\r\n", "\n").split("\n"))
    for line in lines:
        if not line:
            continue
        equals, heredoc = line.find("="), line.find("<<")
        if equals >= 0 and (heredoc < 0 or equals < heredoc):
            name, value = line[:equals], line[equals + 1 :]
        elif heredoc >= 0:
            name, end = line[:heredoc], line[heredoc + 2 :]
            value = _until(lines, end)
        else:
            raise FileCommandError(f"Invalid format '{line[:100]}'")
        if not name:
            raise FileCommandError(f"Invalid format '{line[:100]}'. Name must not be empty")
        values[name] = value
    return values


def _until(lines: Any, end: str) -> str:
    taken: list[str] = []
    for line in lines:
        if line == end:
            return "\n".join(taken)
        taken.append(line)
    raise FileCommandError(f"Invalid value. Matching delimiter not found '{end[:100]}'")
