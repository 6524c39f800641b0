"""Minimal GitHub Actions runner for action.yml: expressions, environment files and workflow commands."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
#: Files of the repository that the action uses.
PARTS = ("action.yml", "deploy/action")
REPOSITORY = "acme/remuda"
LIMIT_S = 480
#: Workflow commands of the runner.
WORKFLOW_COMMANDS = frozenset(
    {
        *("add-mask", "add-matcher", "add-path", "debug", "echo", "endgroup", "error", "group", "notice"),
        *("remove-matcher", "save-state", "set-env", "set-output", "stop-commands", "warning"),
    }
)

_EXPRESSION = re.compile(r"\$\{\{\s*(.*?)\s*\}\}")
_OUTPUT = re.compile(r"steps\.([\w-]+)\.outputs\.([\w-]+)")


@dataclass(frozen=True, kw_only=True)
class WorkflowCommand:
    name: str
    properties: Mapping[str, str]
    data: str


def parse_command(line: str) -> WorkflowCommand | None:
    """Parse like the runner's `ActionCommand.cs`: `::` at the start of a line, or the older `##[` anywhere."""
    trimmed = line.lstrip()
    if trimmed.startswith("::") and "::" in trimmed[2:]:
        info, _, data = trimmed[2:].partition("::")
        separator = ","
    elif "##[" in line and "]" in line.split("##[", 1)[1]:
        info, _, data = line.split("##[", 1)[1].partition("]")
        separator = ";"
    else:
        return None
    name, _, rest = info.partition(" ")
    if name.lower() not in WORKFLOW_COMMANDS:
        return None
    pairs = (item.partition("=") for item in rest.strip().split(separator) if "=" in item)
    return WorkflowCommand(
        name=name.lower(), properties={key: _unescaped(value) for key, _, value in pairs}, data=_unescaped(data)
    )


def _unescaped(text: str) -> str:
    for escaped, plain in (("%0D", "\r"), ("%0A", "\n"), ("%3A", ":"), ("%2C", ","), ("%25", "%")):
        text = text.replace(escaped, plain)
    return text


def parse_file(text: str) -> dict[str, str]:
    """Parse GITHUB_OUTPUT or GITHUB_ENV: `name=value`, or `name<<END`, lines, `END`."""
    values: dict[str, str] = {}
    lines = iter(text.splitlines())
    for line in lines:
        heredoc = re.fullmatch(r"([^=<]+)<<(.+)", line)
        if heredoc:
            name, end = heredoc.groups()
            value = []
            for part in lines:
                if part == end:
                    break
                value.append(part)
            else:
                raise ValueError(f"{name} has no end")
            values[name] = "\n".join(value)
        elif line:
            name, found, plain = line.partition("=")
            if not found:
                raise ValueError(f"neither name=value nor name<<END: {line!r}")
            values[name] = plain
    return values


@dataclass(kw_only=True)
class ActionResult:
    code: int
    log: list[str]
    outputs: dict[str, str]
    summary: str

    @property
    def commands(self) -> list[WorkflowCommand]:
        return [command for line in self.log if (command := parse_command(line))]

    def annotations(self, level: str) -> list[WorkflowCommand]:
        return [command for command in self.commands if command.name == level]

    @property
    def masks(self) -> set[str]:
        return {command.data for command in self.annotations("add-mask")}

    def visible_text(self) -> str:
        """All visible text before the runner masks secrets, without the mask commands."""
        seen = [line for line in self.log if not line.startswith("::add-mask::")]
        return "\n".join([*seen, *self.outputs.values(), self.summary])


@dataclass(kw_only=True)
class StepRun:
    """A running step."""

    process: subprocess.Popen[str]
    log: list[str] = field(default_factory=list)

    def read_until(self, *texts: str) -> None:
        """Read lines until each text has appeared, in any order."""
        assert self.process.stdout is not None
        missing = set(texts)
        for line in self.process.stdout:
            self.log.append(line.rstrip("\n"))
            missing -= {text for text in missing if text in line}
            if not missing:
                return
        raise AssertionError(f"no line has {missing}:\n" + "\n".join(self.log))

    def finish(self, timeout_s: float) -> int:
        """Wait for the end. Raises `TimeoutExpired`; the lines read so far are kept."""
        code = self.process.wait(timeout_s)
        assert self.process.stdout is not None
        self.log += [line.rstrip("\n") for line in self.process.stdout]
        self.process.stdout.close()
        return code


class ActionJob:
    """One use of the action in a job, with a workspace, a tool cache and the runner's variables."""

    def __init__(
        self,
        *,
        action: Path,
        folder: Path,
        tools: Path,
        environment: Mapping[str, str],
        head_repository: str = "",
    ) -> None:
        self._action = action
        self._document: dict[str, Any] = yaml.safe_load((action / "action.yml").read_text())
        self._folder = folder
        self.workspace = folder / "workspace"
        self.workspace.mkdir(parents=True)
        self._temporary = folder / "temp"
        self._temporary.mkdir()
        self._summary = folder / "summary"
        self._github = {
            "action_path": str(action),
            "action_repository": REPOSITORY,
            "event.pull_request.head.repo.full_name": head_repository,
        }
        self._runner = {"temp": str(self._temporary), "tool_cache": str(tools), "os": "Linux"}
        self._environment = {
            **environment,
            "GITHUB_ACTIONS": "true",
            "GITHUB_ACTION_PATH": str(action),
            "GITHUB_WORKSPACE": str(self.workspace),
            "RUNNER_TEMP": str(self._temporary),
            "RUNNER_TOOL_CACHE": str(tools),
        }
        self._outputs: dict[str, dict[str, str]] = {}
        self._inputs: dict[str, str] = {}

    def run(self, **inputs: str) -> ActionResult:
        """Run all steps until one fails."""
        *first, last = self._begin(inputs)
        log: list[str] = []
        for step in [*first, last]:
            started = self._start(step)
            code = started.finish(LIMIT_S)
            log += started.log
            self._collect(step)
            if code:
                break
        return self._result(code, log)

    def start_last(self, **inputs: str) -> StepRun:
        """Run all steps but the last, and start that."""
        *first, last = self._begin(inputs)
        for step in first:
            done = self._start(step)
            assert done.finish(LIMIT_S) == 0, done.log
            self._collect(step)
        return self._start(last)

    def end_last(self, started: StepRun, code: int) -> ActionResult:
        self._collect(self._document["runs"]["steps"][-1])
        return self._result(code, started.log)

    def _begin(self, inputs: Mapping[str, str]) -> list[dict[str, Any]]:
        declared = self._document["inputs"]
        given = {name.replace("_", "-"): value for name, value in inputs.items()}
        assert set(given) <= set(declared), set(given) - set(declared)
        self._inputs = {name: given.get(name, str(entry.get("default", ""))) for name, entry in declared.items()}
        steps: list[dict[str, Any]] = self._document["runs"]["steps"]
        return steps

    def _start(self, step: dict[str, Any]) -> StepRun:
        assert set(step) <= {"id", "name", "shell", "env", "run"}, f"unsupported keys in {set(step)}"
        assert step["shell"] == "bash"
        script = self._temporary / f"{step['id']}.sh"
        script.write_text(self._substituted(step["run"]))
        files = {f"GITHUB_{name}": self._file(step, name) for name in ("OUTPUT", "ENV", "PATH")}
        environment = {name: self._substituted(str(value)) for name, value in step.get("env", {}).items()}
        process = subprocess.Popen(
            ["bash", "--noprofile", "--norc", "-e", "-o", "pipefail", script],
            env={
                **self._environment,
                **environment,
                **{name: str(file) for name, file in files.items()},
                "GITHUB_STEP_SUMMARY": str(self._summary),
            },
            cwd=self.workspace,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # So that Ctrl-C in the test run does not reach the step.
            start_new_session=True,
        )
        return StepRun(process=process)

    def _file(self, step: dict[str, Any], name: str) -> Path:
        file = self._temporary / f"{step['id']}-{name}"
        file.touch()
        return file

    def _collect(self, step: dict[str, Any]) -> None:
        self._outputs[step["id"]] = parse_file(self._file(step, "OUTPUT").read_text())
        self._environment |= parse_file(self._file(step, "ENV").read_text())
        assert not self._file(step, "PATH").read_text()

    def _substituted(self, text: str) -> str:
        return _EXPRESSION.sub(lambda found: self._value(found[1]), text)

    def _value(self, expression: str) -> str:
        if output := _OUTPUT.fullmatch(expression):
            return self._outputs.get(output[1], {}).get(output[2], "")
        context, _, name = expression.partition(".")
        known = {"inputs": self._inputs, "runner": self._runner, "github": self._github}
        return known[context][name]

    def _result(self, code: int, log: list[str]) -> ActionResult:
        outputs = {name: self._substituted(entry["value"]) for name, entry in self._document["outputs"].items()}
        summary = self._summary.read_text() if self._summary.exists() else ""
        return ActionResult(code=code, log=log, outputs=outputs, summary=summary)


def copy_action(folder: Path) -> Path:
    """Copy the action's files, like a runner does."""
    folder.mkdir(parents=True, exist_ok=True)
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, folder / part)
        else:
            shutil.copy(ROOT / part, folder / part)
    return folder


# Packages -------------------------------------------------------------------------------------------------------------

#: Folder in which `make` keeps the installation reports of pip.
REPORTS = Path(sys.prefix) / "install-reports"
#: Part of every virtualenv, and so in no report.
PREINSTALLED = frozenset({"pip", "setuptools"})


def offline_index(folder: Path) -> dict[str, str]:
    """Environment variables with which pip reinstalls the packages of this environment without querying the index.

    They name a page of download links. Empty if the reports do not cover all installed packages.
    """
    reported = [item for file in REPORTS.glob("*.json") for item in json.loads(file.read_bytes())["install"]]
    in_reports = {_normalized(item["metadata"]["name"], item["metadata"]["version"]) for item in reported}
    installed = {_normalized(item.name, item.version) for item in distributions() if item.name not in PREINSTALLED}
    if not installed <= in_reports:
        return {}
    files = {item["download_info"]["url"]: _digest(item["download_info"]) for item in reported}
    page = folder / "links.html"
    page.write_text("".join(f'<a href="{url}{digest}">{url}</a>\n' for url, digest in sorted(files.items()) if digest))
    return {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": page.as_uri()}


def _normalized(name: str, version: str) -> tuple[str, str]:
    return name.lower().replace("_", "-").replace(".", "-"), version


def _digest(download: Mapping[str, Any]) -> str:
    """The fragment of the link; empty for a package that was not downloaded, such as this one."""
    archive = download.get("archive_info", {})
    # Older versions of pip report a single field.
    digest = archive.get("hashes", {}).get("sha256") or str(archive.get("hash", "")).removeprefix("sha256=")
    return f"#sha256={digest}" if digest else ""
