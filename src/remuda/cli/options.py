"""Options of the commands: generated from the declarations of the settings, grouped in `--help`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import click
from click.shell_completion import CompletionItem

from remuda.config.declaration import (
    DEPLOY_COMMANDS,
    POOL_COMMANDS,
    Group,
    InvalidValue,
    Setting,
    ValueKind,
    flag,
    variable,
)
from remuda.config.settings import LOCAL_COMMANDS, SETTINGS
from remuda.domain.errors import UserError
from remuda.domain.resources import MAX_SHOWN
from remuda.domain.text import quote

#: Title of the options that only one command has.
OWN_OPTIONS = "Options"
_SECTIONS = (OWN_OPTIONS, *Group)
#: Columns of help text, also on a wider terminal.
HELP_WIDTH = 80


class _Value(click.ParamType[Any]):
    """The value of an option that is no setting, with the same errors as a setting."""

    def __init__(self, kind: ValueKind) -> None:
        self.name = kind.metavar
        self._kind = kind

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        name = param.opts[0] if param else ""
        try:
            return self._kind.parse(value) if isinstance(value, str) else value
        except InvalidValue:
            raise UserError(
                f"{name} must be {self._kind.expected}, got {quote(value, MAX_SHOWN)}",
                field=name,
                fix=f"see {ctx.command_path} --help" if ctx else "",
            ) from None


class GroupedOption(click.Option):
    """An option with the title of its section in `--help`."""

    def __init__(self, *args: Any, section: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.section = section


def option(
    name: str,
    help: str,  # noqa: A002 - the name that click has for it
    kind: ValueKind | None = None,
    *,
    to: str | None = None,
    default: Any = None,
    section: str = OWN_OPTIONS,
    repeated: bool = False,
    without_value: str | None = None,
) -> GroupedOption:
    """An option that is no setting. Without a `kind` it is a switch. `to` names the parameter of the command.

    `without_value` is its value if it is given without one.
    """
    names = [name] if to is None else [name, to]
    if kind is None:
        return GroupedOption(names, is_flag=True, default=False, help=help, section=section)
    return GroupedOption(
        names,
        type=_Value(kind),
        metavar=kind.metavar,
        default=default,
        is_flag=False,
        flag_value=without_value,
        multiple=repeated,
        help=help,
        section=section,
    )


def _setting_option(declared: Setting) -> GroupedOption:
    """Takes the text as it is: `config.sources` checks it, so that all sources have the same errors."""
    kind, names = declared.kind, [flag(declared.name), declared.name]
    if kind.is_boolean:
        return GroupedOption(names, is_flag=True, default=None, help=declared.help, section=declared.group)

    def complete(_context: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(value) for value in kind.choices if value.startswith(incomplete)]

    return GroupedOption(
        names,
        type=str,
        default=None,
        metavar=kind.metavar,
        help=declared.help,
        section=declared.group,
        shell_complete=complete if kind.choices else None,
    )


def settings_of(command: str) -> list[Setting]:
    """The settings that the command takes as flags."""
    return [declared for declared in SETTINGS.values() if command in declared.commands]


def options_of(command: str) -> list[GroupedOption]:
    return [_setting_option(declared) for declared in settings_of(command)]


def fix_of_unknown_option(name: str, ctx: click.Context | None) -> str:
    """What to do about an option that other commands have; empty if none has it."""
    command = ctx.info_name if ctx is not None else ""
    if re.fullmatch(r"-[0-9.]+", name):
        return f"give a number from 0, as in remuda {command} 500" if command == "budget" else ""
    on_aws = " --backend aws" if command in DEPLOY_COMMANDS else ""
    if name == "--backend" and on_aws:
        return f"omit it: remuda {command} always works on AWS"
    if name == "--region" and command in LOCAL_COMMANDS:
        return "set AWS_REGION"
    declared = next((item for item in SETTINGS.values() if flag(item.name) == name), None)
    if declared is not None and declared.kind.is_secret:
        return f"set {variable(declared.name)}: other users of this computer can read the arguments of a command"
    if declared is not None and declared.name == "monthly_budget":
        return f"run remuda budget 500{on_aws}, which sets it to 500 dollars"
    if declared is not None and declared.name == "pre_runner_script" and command == "deploy":
        return "put the script into the image of --ami: the refresh of the stack removes other scripts"
    if declared is not None and not declared.commands:
        return f"set {variable(declared.name)}, or {declared.key} in remuda.toml"
    parent = ctx.parent.command if ctx is not None and ctx.parent is not None else None
    commands = parent.commands if isinstance(parent, click.Group) else {}
    owners = [each for each, item in commands.items() if any(name in param.opts for param in item.params)]
    if not owners:
        return ""
    after = ": run it with --backend aws after remuda deploy" if on_aws and owners[0] in POOL_COMMANDS else ""
    if command == "up" and "refresh" in owners:
        after = f": run remuda refresh with {name} after remuda up"
    return f"it is an option of remuda {', '.join(owners)}{after}"


class GroupedCommand(click.Command):
    """A command whose help has one section per group of options."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        params = self.get_params(ctx)
        _write_section(formatter, "Arguments", _records(ctx, [item for item in params if isinstance(item, Argument)]))
        for section in _SECTIONS:
            options = [item for item in params if isinstance(item, click.Option) and _section(item) == section]
            _write_section(formatter, section, _records(ctx, options))


class Argument(click.Argument):
    """A positional argument with a description."""

    def __init__(self, *args: Any, help: str, **kwargs: Any) -> None:  # noqa: A002 - as above
        super().__init__(*args, **kwargs)
        self._help = help

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        return self.make_metavar(ctx), self._help


def _section(item: click.Option) -> str:
    # click adds --help itself.
    return item.section if isinstance(item, GroupedOption) else Group.OUTPUT


def _records(ctx: click.Context, items: Sequence[click.Parameter]) -> list[tuple[str, str]]:
    return [record for item in items if (record := item.get_help_record(ctx)) is not None]


def _write_section(formatter: click.HelpFormatter, title: str, records: Iterable[tuple[str, str]]) -> None:
    rows = list(records)
    if rows:
        with formatter.section(title):
            formatter.write_dl(rows)
