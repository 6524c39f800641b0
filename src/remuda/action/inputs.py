"""ActionInputs of the action, the modes that use them, and the settings that they set.

A composite action does not receive its inputs by itself: `action.yml` passes each one as `INPUT_<NAME>`. Empty means
not set.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from remuda.domain.errors import UserError

ALL_MODES = frozenset({"pool"})
RUN = frozenset({"run-id", "run-attempt"})
REQUEST = frozenset(
    {
        "github-scope",
        "instance-count",
        "resource-class",
        "usage-class",
        "allowed-instance-types",
        "max-runtime-min",
        "provision-timeout-sec",
        "tier",
        "repository",
        "ephemeral",
    }
)
POOL = frozenset(
    {
        "github-scope",
        "idle-time-sec",
        "max-runtime-min",
        "release-time-sec",
        "provision-timeout-sec",
        "max-age-sec",
        "max-uses",
        "reuse",
        "max-instances",
        "resource-class-config",
        "pre-runner-script",
        "ami",
        "subnet-ids",
        "security-group-ids",
        "iam-instance-profile",
        "key-name",
        "spot-fallback",
        "actions-runner-version",
        "actions-runner-sha256",
        "actions-runner-url",
        "agent-url",
        "agent-sha256",
        "python-url",
        "python-sha256",
        "github-environment",
    }
)
SCALE_DOWN = frozenset(
    {
        "environment",
        "idle-config",
        "minimum-running-time-in-minutes",
        "runner-boot-time-in-minutes",
        "idle-scope",
        "max-removals-per-cycle",
    }
)
#: Credentials have no flag; commands read them from the environment.
CREDENTIALS = frozenset({"github-token", "github-app-id", "github-app-key"})
SECRETS = frozenset({"github-token", "github-app-key"})
#: Settings by mode.
USED_BY: Mapping[str, frozenset[str]] = {
    "provision": ALL_MODES | RUN | REQUEST,
    "release": ALL_MODES | RUN,
    "refresh": ALL_MODES | POOL,
    "scale-down": ALL_MODES | SCALE_DOWN,
}
SETTINGS = frozenset().union(*USED_BY.values()) | CREDENTIALS
#: Boolean inputs and the mode that uses them.
SWITCHES = {"sweep-only": "refresh", "dry-run": "scale-down"}
#: ActionInputs that are not settings of a command.
STEP_INPUTS = frozenset({"mode", "aws-region", "config", *SWITCHES})
#: Environment variables that contain secrets and are masked.
SECRET_VARIABLES = ("REMUDA_GITHUB_TOKEN", "REMUDA_GITHUB_APP_KEY", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")

_REGION = re.compile(r"[a-z]{2,4}(-[a-z]{2,12}){1,3}-\d{1,2}")
_FLAG = re.compile(r"--([a-z][a-z0-9-]*)")
_VARIABLE = re.compile(r"REMUDA_([A-Z][A-Z0-9_]*)")


@dataclass(frozen=True, kw_only=True, slots=True)
class ActionInputs:
    given: Mapping[str, str]

    @property
    def mode(self) -> str:
        mode = self.given.get("mode", "")
        if mode in USED_BY:
            return mode
        near = difflib.get_close_matches(mode, USED_BY, n=1)
        fix = f"did you mean {near[0]}?" if near else f"use {', '.join(USED_BY)}"
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
        used = USED_BY[self.mode] | CREDENTIALS
        return {name.replace("-", "_"): value for name, value in self.given.items() if name in used}

    def unused(self) -> list[str]:
        """Return the inputs that are set but have no effect in this mode."""
        other_modes = {name for name, mode in SWITCHES.items() if mode != self.mode}
        used = USED_BY[self.mode] | CREDENTIALS | STEP_INPUTS - other_modes
        return sorted(name for name in self.given if name not in used)


def read_inputs(environ: Mapping[str, str]) -> ActionInputs:
    found = {name: environ.get(input_variable(name), "") for name in SETTINGS | STEP_INPUTS}
    # YAML block scalars end with a newline.
    return ActionInputs(given={name: value.strip() for name, value in found.items() if value.strip()})


def input_variable(name: str) -> str:
    return "INPUT_" + name.upper().replace("-", "_")


def as_inputs(text: str) -> str:
    """Replace flags and variables in a message by the names of the inputs."""

    def input_name(name: str, original: str) -> str:
        return name if name in SETTINGS | STEP_INPUTS else original

    text = _FLAG.sub(lambda found: input_name(found[1], found[0]), text)
    return _VARIABLE.sub(lambda found: input_name(found[1].lower().replace("_", "-"), found[0]), text)
