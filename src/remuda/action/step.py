"""The action's step: reads the inputs, runs the command, writes outputs, annotations and the summary.

A composite action does not receive its inputs by itself: `action.yml` passes each one as `INPUT_<NAME>`. Empty means
not set.
"""

from __future__ import annotations

import difflib
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

from remuda.action.output import RolledBackInstance, StepFailure, StepLog, outputs_text, summary
from remuda.adapters.system.clock import SystemIds
from remuda.cli.output import ConsoleEventLog, Output
from remuda.cli.run import EXIT_INTERRUPTED, EXIT_OK, EXIT_PARTIAL, load_settings, run_command
from remuda.config.declaration import ACTION_MODES
from remuda.config.settings import SETTINGS
from remuda.domain.errors import Interrupted, RemudaError, UserError
from remuda.domain.pool_config import DEFAULT_GROUP_ID
from remuda.domain.text import sanitize

if TYPE_CHECKING:
    from remuda.controlplane.context import Context
    from remuda.domain.instance import Credential
    from remuda.domain.pool_config import PoolConfig
    from remuda.ports.clock import Clock
    from remuda.ports.event_log import EventLog
    from remuda.ports.github import GitHub, JitRunner
    from remuda.ports.store import InstanceStore

Mask = Callable[[str], None]

#: GitHub shows at most ten annotations of each level per step.
MAX_WARNINGS = 8
#: Inputs that are settings, by mode.
SETTINGS_BY_MODE: Mapping[str, frozenset[str]] = {
    mode: frozenset(item.key for item in SETTINGS.values() if mode in item.modes) for mode in ACTION_MODES
}
SETTING_INPUTS = frozenset().union(*SETTINGS_BY_MODE.values())
SECRETS = frozenset(item.key for item in SETTINGS.values() if item.is_input and item.kind.is_secret)
#: Boolean inputs and the mode that uses them.
SWITCHES = {"sweep-only": "refresh", "dry-run": "scale-down"}
#: Inputs that are no settings.
STEP_INPUTS = frozenset(
    {"mode", "aws-region", "config", "direct", "broker-url", "direct-bundle", "direct-bundle-sha256", *SWITCHES}
)
#: Modes that use the broker, unless they are direct.
BROKER_MODES = ("provision", "release")
#: Environment variables that contain secrets and are masked.
SECRET_VARIABLES = ("REMUDA_GITHUB_TOKEN", "REMUDA_GITHUB_APP_KEY", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")

_REGION = re.compile(r"[a-z]{2,4}(-[a-z]{2,12}){1,3}-\d{1,2}")
_FLAG = re.compile(r"--([a-z][a-z0-9-]*)")
_VARIABLE = re.compile(r"REMUDA_([A-Z][A-Z0-9_]*)")


class MaskingGitHub:
    """GitHub port that masks every token as soon as it is created."""

    def __init__(self, github: GitHub, mask: Mask) -> None:
        self._github = github
        self._mask = mask

    def __getattr__(self, name: str) -> Any:
        return getattr(self._github, name)

    async def registration_token(self, scope: str) -> Credential:
        return self._masked(await self._github.registration_token(scope))

    async def removal_token(self, scope: str) -> Credential:
        return self._masked(await self._github.removal_token(scope))

    async def jit_config(
        self, scope: str, *, name: str, labels: Sequence[str], group_id: int = DEFAULT_GROUP_ID
    ) -> JitRunner:
        runner = await self._github.jit_config(scope, name=name, labels=labels, group_id=group_id)
        self._mask(runner.config)
        return runner

    def _masked(self, credential: Credential) -> Credential:
        self._mask(credential.token)
        return credential


class MaskingStore:
    """Store port that masks the pool's tokens as soon as they are read."""

    def __init__(self, store: InstanceStore, mask: Mask) -> None:
        self._store = store
        self._mask = mask

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def get_config(self) -> PoolConfig | None:
        config = await self._store.get_config()
        for tokens in config.tokens if config is not None else ():
            self._mask(tokens.registration.token)
            self._mask(tokens.removal.token)
        return config


class LogOutput(Output):
    """Output that writes every line to the step's log at once."""

    def __init__(self, channel: StepLog) -> None:
        super().__init__(as_json=False)
        self.channel = channel

    def say(self, *lines: str, style: str | None = None) -> None:  # noqa: ARG002 - a log has no styles
        for line in lines:
            self.channel.say(sanitize(line))

    def log_line(self, line: str) -> None:
        self.channel.say(line)


class StepOutput(Output):
    """Output that collects the command's messages and results for the end of the step."""

    def __init__(self, channel: StepLog) -> None:
        super().__init__(as_json=False)
        self.channel = channel
        #: Messages of the command, written after the collapsed log group so that they are visible.
        self.messages: list[str] = []
        self.document: Mapping[str, Any] = {}
        self.failure: RemudaError | None = None
        self.warnings: list[str] = []
        self.rolled_back: list[RolledBackInstance] = []

    def say(self, *lines: str, style: str | None = None) -> None:  # noqa: ARG002 - a log has no styles
        self.messages.extend(map(sanitize, lines))

    def show(self, renderable: Any) -> None:
        """Do nothing: the summary contains the tables."""

    def answer(self, *renderables: Any, soft_wrap: bool = False) -> None:
        """Do nothing, as above."""

    def result(self, document: Mapping[str, Any]) -> None:
        self.document = document

    def error(self, error: RemudaError) -> None:
        self.failure = error

    def event_log(self, clock: Clock) -> EventLog:
        return StepEventLog(self, clock)

    def guarded(self, context: Context) -> Context:
        mask = self.channel.mask
        store = cast("InstanceStore", MaskingStore(context.store, mask))
        github = cast("GitHub", MaskingGitHub(context.github, mask)) if context.github is not None else None
        return replace(context, store=store, github=github)


class StepEventLog(ConsoleEventLog):
    """Event log that also collects the rolled back instances for the summary."""

    def __init__(self, output: StepOutput, clock: Clock) -> None:
        super().__init__(LogOutput(output.channel), clock)
        self._step = output
        self._rolling_back = False

    def record(self, action: str, why: str = "", **facts: Any) -> None:
        super().record(action, why, **facts)
        if action == "rollback":
            self._rolling_back = True
        elif action == "rollback-incomplete":
            self._step.warnings.append(why)
        elif self._rolling_back and (facts.get("target") or action == "tombstone"):
            self._step.rolled_back.append(
                RolledBackInstance(
                    instance_id=str(facts.get("instance_id", "")),
                    source=str(facts.get("source") or "launched"),
                    target=str(facts.get("target") or "terminating"),
                )
            )


class _StepLogHandler(logging.Handler):
    """Writes log records of libraries to the step's log, because they may contain untrusted text."""

    def __init__(self, channel: StepLog) -> None:
        super().__init__(logging.WARNING)
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        self._channel.say(f"{record.name}: {record.getMessage()}")


def main(stream: TextIO | None = None) -> int:
    channel = StepLog(stream or _standard_output())
    inputs = read_inputs(os.environ)
    # Masked before anything is written.
    for secret in [*inputs.secrets(), *(os.environ.get(name, "") for name in SECRET_VARIABLES)]:
        channel.mask(secret)
    logging.basicConfig(handlers=[_StepLogHandler(channel)])
    output = StepOutput(channel)
    code = run_command(output, lambda: _run(inputs, output))
    return _finish(inputs, output, code)


def _standard_output() -> TextIO:
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")
    return sys.stdout


def _run(inputs: ActionInputs, output: StepOutput) -> int:
    mode, region = inputs.mode, inputs.region
    switches = {name: inputs.switch(name) for name in SWITCHES}
    if unused := inputs.unused():
        output.warnings.append(
            f"mode {mode} does not use {', '.join(unused)}: remove it, or set it for a mode that uses it"
        )
    if region:
        os.environ["AWS_REGION"] = region
    # A file in the workspace may come from a pull request, so it is read only if it is named explicitly.
    config = inputs.config or os.environ.get("REMUDA_CONFIG") or os.devnull
    flags = {**inputs.flags(), "backend": "aws"}
    with output.channel.grouped(f"remuda {mode}"):
        from remuda.cli import lifecycle  # noqa: PLC0415 - slow to import; invalid inputs fail before

        settings = load_settings(flags, config)
        if mode == "provision":
            return lifecycle.run_provision(settings, output)
        if mode == "release":
            return lifecycle.run_release(settings, output)
        if mode == "refresh":
            return lifecycle.run_refresh(settings, output, sweep_only=switches["sweep-only"], reset=False, every=None)
        return lifecycle.run_scale_down(settings, output, dry_run=switches["dry-run"], every=None)


def _finish(inputs: ActionInputs, output: StepOutput, code: int) -> int:
    """Write annotations, summary and outputs. Return the step's exit code."""
    files = finish(inputs.given.get("mode", "")[:20], output, code)
    try:
        _append(os.environ.get("GITHUB_STEP_SUMMARY"), files.summary)
    except OSError as error:
        output.channel.annotate("warning", f"cannot write the summary: {error.strerror}", title="remuda")
    try:
        _append(os.environ.get("GITHUB_OUTPUT"), files.outputs)
    except OSError as error:
        message = f"cannot write the outputs: {error.strerror}; run release to return the runners"
        output.channel.annotate("error", message, title="remuda provision")
        return EXIT_PARTIAL
    return code


@dataclass(frozen=True, kw_only=True, slots=True)
class StepFiles:
    """The texts that the step appends to GitHub's files."""

    summary: str
    outputs: str = ""


def finish(mode: str, output: StepOutput, code: int) -> StepFiles:
    """Write the messages and annotations to the log. Return summary and outputs."""
    failure = _failure(output, code)
    for text in output.messages:
        output.channel.say(text)
    _annotate(f"remuda {mode}".strip(), output, failure)
    # Before the summary escapes and cuts texts: a part of a secret is not recognized any more.
    page = summary(mode, output.channel.redact_all(output.document), failure, output.rolled_back)
    if mode != "provision" or code != EXIT_OK:
        return StepFiles(summary=page)
    document, ids = output.document, SystemIds()
    values = {
        "label": str(document["label"]),
        "instance-ids": json.dumps([item["instance_id"] for item in document["instances"]]),
        "reused": str(document["reused"]),
        "created": str(document["created"]),
    }
    return StepFiles(summary=page, outputs=outputs_text(values, lambda: ids.new("end-of-output-")))


def _annotate(title: str, output: StepOutput, failure: StepFailure | None) -> None:
    channel, document = output.channel, output.document
    warnings = [*output.warnings]
    warnings += [f"{name} is not released: {document['reasons'].get(name, '')}" for name in document.get("expired", ())]
    warnings += [*document.get("warnings", ()), *document.get("errors", ())]
    for warning in warnings[:MAX_WARNINGS]:
        channel.annotate("warning", as_inputs(warning), title=title)
    if len(warnings) > MAX_WARNINGS:
        channel.annotate("warning", f"and {len(warnings) - MAX_WARNINGS} more: see the log", title=title)
    if failure is not None:
        channel.annotate("notice" if failure.interrupted else "error", failure.text, title=title)


def _failure(output: StepOutput, code: int) -> StepFailure | None:
    error = output.failure
    if error is None and code == EXIT_INTERRUPTED:
        error = Interrupted("interrupted before the command started")
    if error is None:
        return None
    return StepFailure(
        message=as_inputs(output.channel.redact(error.message)),
        fix=as_inputs(output.channel.redact(error.fix)),
        exit_code=error.exit_code,
        interrupted=isinstance(error, Interrupted),
    )


def _append(file: str | None, text: str) -> None:
    """Append to a file of GitHub's. It does not exist outside of a workflow."""
    if file and text:
        with Path(file).open("a", encoding="utf-8") as out:
            out.write(text)


@dataclass(frozen=True, kw_only=True, slots=True)
class ActionInputs:
    given: Mapping[str, str]

    @property
    def mode(self) -> str:
        mode = self.given.get("mode", "")
        if mode in SETTINGS_BY_MODE:
            return mode
        near = difflib.get_close_matches(mode, SETTINGS_BY_MODE, n=1)
        fix = f"did you mean {near[0]}?" if near else f"use {', '.join(SETTINGS_BY_MODE)}"
        raise UserError(f"mode is {mode[:80]!r}", field="mode", fix=fix)

    @property
    def region(self) -> str:
        region = self.given.get("aws-region", "")
        if region and not _REGION.fullmatch(region):
            raise UserError(
                f"aws-region is {region[:80]!r}", field="aws-region", fix="use a region such as eu-central-1"
            )
        return region

    @property
    def config(self) -> str:
        return self.given.get("config", "")

    def switch(self, name: str) -> bool:
        text = self.given.get(name, "false")
        if text not in {"true", "false"}:
            raise UserError(f"{name} is {text[:80]!r}", field=name, fix="use true or false")
        return text == "true"

    def secrets(self) -> list[str]:
        return [self.given[name] for name in sorted(SECRETS) if name in self.given]

    def flags(self) -> dict[str, str]:
        """Return the settings that the mode's command accepts."""
        used = SETTINGS_BY_MODE[self.mode]
        return {name.replace("-", "_"): value for name, value in self.given.items() if name in used}

    def unused(self) -> list[str]:
        """Return the inputs that are set but have no effect in this mode."""
        other_modes = {name for name, mode in SWITCHES.items() if mode != self.mode}
        # This code runs without the broker.
        used = SETTINGS_BY_MODE[self.mode] | STEP_INPUTS - other_modes - {"broker-url"}
        return sorted(name for name in self.given if name not in used)


def read_inputs(environ: Mapping[str, str]) -> ActionInputs:
    found = {name: environ.get(input_variable(name), "") for name in SETTING_INPUTS | STEP_INPUTS}
    # YAML block scalars end with a newline.
    return ActionInputs(given={name: value.strip() for name, value in found.items() if value.strip()})


def input_variable(name: str) -> str:
    return "INPUT_" + name.upper().replace("-", "_")


def as_inputs(text: str) -> str:
    """Replace flags and variables in a message by the names of the inputs."""

    def input_name(name: str, original: str) -> str:
        return name if name in SETTING_INPUTS | STEP_INPUTS else original

    text = _FLAG.sub(lambda found: input_name(found[1], found[0]), text)
    return _VARIABLE.sub(lambda found: input_name(found[1].lower().replace("_", "-"), found[0]), text)
