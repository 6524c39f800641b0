"""ActionInputs of the action, the modes that use them, and the settings that they set.

A composite action does not receive its inputs by itself: `action.yml` passes each one as `INPUT_<NAME>`. Empty means
not set.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from remuda.config.declaration import ACTION_MODES
from remuda.config.settings import SETTINGS
from remuda.domain.errors import UserError

#: Inputs that are settings, by mode.
SETTINGS_BY_MODE: Mapping[str, frozenset[str]] = {
    mode: frozenset(item.key for item in SETTINGS.values() if mode in item.modes) for mode in ACTION_MODES
}
SETTING_INPUTS = frozenset().union(*SETTINGS_BY_MODE.values())
SECRETS = frozenset(item.key for item in SETTINGS.values() if item.is_input and item.kind.is_secret)
#: Boolean inputs and the mode that uses them.
SWITCHES = {"sweep-only": "refresh", "dry-run": "scale-down"}
#: Inputs that are no settings.
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
        used = SETTINGS_BY_MODE[self.mode] | STEP_INPUTS - other_modes
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
