"""Declarations of settings: the form of a declaration, and what follows from it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from remuda.config.kinds import ValueKind


class Group(StrEnum):
    """Sections of `--help` and of the reference."""

    RUN = "Run"
    POOL = "Pool"
    AWS = "AWS"
    SCALE_DOWN = "Scale-down"
    GITHUB = "GitHub"
    LOCAL = "Local backend"
    COMMON = "Common"
    OUTPUT = "Output"


#: Commands that act on one pool.
POOL_COMMANDS = (
    "up",
    "down",
    "refresh",
    "provision",
    "release",
    "scale-down",
    "status",
    "explain",
    "report",
    "dashboard",
    "drain",
    "quarantine",
    "terminate",
    "doctor",
)
ALL_COMMANDS = (*POOL_COMMANDS, "config", "run-workflow", "demo")
#: Modes of the GitHub Action: each runs the command of that name.
ACTION_MODES = ("provision", "release", "refresh", "scale-down")

DEFAULT = "default"


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """The declaration of one setting."""

    name: str = ""
    kind: ValueKind
    default: Any
    description: str
    #: The default in words, if it depends on something else.
    default_text: str
    group: Group
    #: Commands that take it as a flag. Other settings are read from the environment and the file only.
    commands: tuple[str, ...]
    #: Whether the GitHub Action has it as an input.
    is_input: bool
    #: Whether the CloudFormation stack has it as a parameter.
    is_parameter: bool
    #: Whether it is stored with the pool as a launch option of EC2 instances.
    is_launch_option: bool
    #: Environment variables of other programs that set it too; REMUDA_… has priority.
    other_variables: tuple[str, ...]

    @property
    def key(self) -> str:
        return key(self.name)

    @property
    def parameter(self) -> str:
        """The name of the CloudFormation parameter."""
        return "".join(word.capitalize() for word in self.name.split("_"))

    @property
    def modes(self) -> tuple[str, ...]:
        """The modes of the GitHub Action that take it as an input."""
        if not self.is_input:
            return ()
        # A credential is no flag, but every mode takes it.
        return tuple(mode for mode in ACTION_MODES if mode in self.commands) or ACTION_MODES

    @property
    def shown_default(self) -> str:
        """The default in words, or an empty text."""
        if self.default_text or self.default in {None, "", ()}:
            return self.default_text
        if isinstance(self.default, bool):
            return str(self.default).lower()
        return f"{self.default:.15g}" if isinstance(self.default, float) else str(self.default)

    @property
    def full_description(self) -> str:
        """The description with choices and default, for formats that have no fields for these."""
        choices = f" One of {', '.join(self.kind.choices)}." if self.kind.choices else ""
        return self.description + choices + (f" Default: {self.shown_default}." if self.shown_default else "")

    @property
    def help(self) -> str:
        is_off = self.kind.is_boolean and not self.default
        return self.description + (f" (default: {self.shown_default})" if self.shown_default and not is_off else "")


def flag(name: str) -> str:
    return "--" + key(name)


def variable(name: str) -> str:
    return "REMUDA_" + name.upper()


def key(name: str) -> str:
    return name.replace("_", "-")


def declare(
    kind: ValueKind,
    default: Any,
    description: str,
    *,
    group: Group,
    commands: Iterable[str] = (),
    is_input: bool | None = None,
    is_parameter: bool = False,
    is_launch_option: bool = False,
    other_variables: tuple[str, ...] = (),
    default_text: str = "",
) -> Any:
    """A dataclass field with the declaration.

    Unless `is_input` says otherwise, a flag of a command that the action runs is an input of the action.
    """
    taken_by = tuple(commands)
    declared = Setting(
        kind=kind,
        default=default,
        description=description,
        default_text=default_text,
        group=group,
        commands=taken_by,
        is_input=bool(set(taken_by) & set(ACTION_MODES)) if is_input is None else is_input,
        is_parameter=is_parameter,
        is_launch_option=is_launch_option,
        other_variables=other_variables,
    )
    return field(default=default, metadata={"setting": declared})
