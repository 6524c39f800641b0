"""Sources of settings: flag, environment variable, remuda.toml, default, in this order of priority.

The only reader of the environment and of the file. `--idle-time-sec`, `REMUDA_IDLE_TIME_SEC` and `idle-time-sec` are
the same setting. The source of each value is kept, so that an error names what the user wrote.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from remuda.config.declaration import Group, InvalidValue, Setting, flag, key, variable
from remuda.config.settings import SETTINGS, Settings, shown_name
from remuda.domain.errors import UserError
from remuda.domain.resources import MAX_SHOWN
from remuda.domain.runner_set import in_scope
from remuda.domain.text import nearest, quote
from remuda.source_repository import documentation

FILE_NAME = "remuda.toml"
SETTINGS_PAGE = "docs/reference/settings.md"
#: Table of the file with the settings of scale-down, by the names that terraform-aws-github-runner gives them.
SCALE_DOWN_TABLE = "scale_down"
_SCALE_DOWN_KEYS = tuple(name for name, item in SETTINGS.items() if item.group is Group.SCALE_DOWN)
_PEM = "-----BEGIN"
_PREFIX = "REMUDA_"
#: Variables with the prefix that are not settings: of this module, the dashboard, the functions and the action.
OTHER_VARIABLES = frozenset(
    {"REMUDA_CONFIG", "REMUDA_DASHBOARD_TOKEN", "REMUDA_SETTINGS_PARAMETER", "REMUDA_BROKER_URL", "REMUDA_STEP"}
)


def load(flags: Mapping[str, Any], *, environ: Mapping[str, str], file: Path | None = None) -> Settings:
    """Merge the sources and check every value. Raises `UserError` for the first one that is invalid."""
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for name, value in _read_file(file, environ).items():
        values[name], origins[name] = value, f"file: {key(name)}"
    for name, declared in SETTINGS.items():
        for source in (*declared.other_variables, variable(name)):
            if environ.get(source):
                values[name], origins[name] = environ[source], source
        if flags.get(name) is not None:
            values[name], origins[name] = flags[name], flag(name)
    values = {name: _read_named_file(name, value, origins) for name, value in values.items()}
    parsed = {name: _parse(name, value, origins) for name, value in values.items()}
    written = {name: value for name, value in values.items() if not SETTINGS[name].kind.is_secret}
    settings = Settings(**parsed, origins=origins, written=written, file=str(file or ""))
    try:
        return replace(settings, runner_sets=in_scope(settings.runner_sets, settings.github_scope))
    except UserError as error:
        raise UserError(error.message, field=settings.shown("runner_sets"), fix=error.fix) from None


def _read_named_file(name: str, value: Any, origins: Mapping[str, str]) -> Any:
    """The content of the file that @FILE names, or the value itself."""
    if not (SETTINGS[name].kind.takes_file and isinstance(value, str)):
        return value
    shown = shown_name(name, origins)
    if not value.startswith("@"):
        # A script may consist of the name of a program, but JSON is never the name of a file.
        if SETTINGS[name].kind.is_json and value[:1] not in "[{" and _is_file(value):
            raise UserError(
                f"{shown} is {quote(value, MAX_SHOWN)}, the name of a file",
                field=shown,
                fix=f"write @{value[:MAX_SHOWN]} to give its content",
            )
        return value
    try:
        return Path(value[1:]).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UserError(
            f"{shown} is {quote(value, MAX_SHOWN)}, but the file cannot be read: {reason}",
            field=shown,
            fix="name a readable file after the @",
        ) from None


def _is_file(name: str) -> bool:
    try:
        return Path(name).is_file()
    except (OSError, ValueError):
        return False


def _parse(name: str, value: Any, origins: Mapping[str, str]) -> Any:
    kind, shown = SETTINGS[name].kind, shown_name(name, origins)
    try:
        return kind.parse(value)
    except InvalidValue as error:
        got = "another value (hidden)" if kind.is_secret else quote(value, MAX_SHOWN)
        detail = f": {error}" if str(error) else ""
        raise UserError(f"{shown} must be {kind.expected}, got {got}{detail}", field=shown) from None
    except UserError as error:
        raise UserError(error.message, field=shown, fix=error.fix) from None


def _read_file(file: Path | None, environ: Mapping[str, str]) -> dict[str, Any]:
    named = file or (Path(environ["REMUDA_CONFIG"]) if environ.get("REMUDA_CONFIG") else None)
    path = named or Path(FILE_NAME)
    if named is None and not path.exists():
        return {}
    fix = "correct it, or name another file with --config"
    try:
        import tomllib  # noqa: PLC0415 - not needed without a file

        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}", field="config", fix=fix) from None
    except (ValueError, RecursionError) as error:
        # Not only invalid TOML: bytes that are not UTF-8, and numbers or nesting beyond the limits of Python.
        fix += '; texts have quotation marks, as in pool = "ci"'
        raise UserError(f"{path} is not TOML: {error}", field="config", fix=fix) from None
    known = {key(name): name for name in SETTINGS}
    document |= _read_scale_down_table(path, document)
    for given in document:
        if given not in known:
            raise UserError(
                f"{path} has an unknown key {given[:MAX_SHOWN]!r}",
                field=given[:MAX_SHOWN],
                fix=_fix_of_unknown_key(given, document[given], known),
            )
        if isinstance(document[given], dict) and not SETTINGS[known[given]].kind.takes_table:
            raise UserError(
                f"{path}: {given} is a table",
                field=given,
                fix=f"write {_toml_example(SETTINGS[known[given]], document[given])}",
            )
    return {known[given]: value for given, value in document.items()}


def _fix_of_unknown_key(given: str, value: object, known: Mapping[str, str]) -> str:
    words = [*known, SCALE_DOWN_TABLE]
    near = nearest(given, words) or nearest(key(given).lower(), words)
    if near:
        return f"did you mean {near}?"
    if isinstance(value, dict):
        return f"write its settings at the top of the file, without [{given[:MAX_SHOWN]}]"
    return f"{documentation(SETTINGS_PAGE)} lists the settings"


def _toml_example(declared: Setting, table: Mapping[str, Any]) -> str:
    """The setting as it is written in TOML, with the value of the table if it has only one."""
    if declared.name in {"runner_sets", "idle_config"}:
        return f"[[{declared.key}]], with two brackets, above each element"
    values = list(table.values())
    value = values[0] if len(values) == 1 and not isinstance(values[0], dict | list) else declared.default
    # TOML writes these values as JSON does.
    is_plain = isinstance(value, str | int | float) and value != "" and not declared.kind.is_secret
    return f"{declared.key} = {json.dumps(str(value) if isinstance(value, str) else value) if is_plain else '…'}"


def _read_scale_down_table(path: Path, document: dict[str, Any]) -> dict[str, Any]:
    table = document.pop(SCALE_DOWN_TABLE, {})
    if not isinstance(table, dict):
        raise UserError(
            f"{path}: {SCALE_DOWN_TABLE} must be a table", field=SCALE_DOWN_TABLE, fix=f"write [{SCALE_DOWN_TABLE}]"
        )
    for given in table:
        if given not in _SCALE_DOWN_KEYS:
            near = nearest(given, _SCALE_DOWN_KEYS)
            raise UserError(
                f"{path} has an unknown key {given[:MAX_SHOWN]!r} in [{SCALE_DOWN_TABLE}]",
                field=f"{SCALE_DOWN_TABLE}.{given[:MAX_SHOWN]}",
                fix=f"did you mean {near}?" if near else f"use {', '.join(_SCALE_DOWN_KEYS)}",
            )
    return {key(name): value for name, value in table.items()}


def check_backend(settings: Settings) -> list[str]:
    """Refuse flags that the backend has no use for. Return a warning per setting of another source.

    A variable or a settings file may be shared with commands of the other backend; a flag is meant for this one.
    """
    if settings.backend != "local":
        return []
    unused = [name for name in settings.origins if SETTINGS[name].is_aws_only]
    for name in unused:
        if settings.origins[name] == flag(name):
            raise UserError(
                f"{flag(name)} is {quote(settings.written[name], MAX_SHOWN)}, which the local backend cannot use",
                field=flag(name),
                fix=f"omit {flag(name)}, or use --backend aws",
            )
    return [f"{settings.shown(name)} has no effect on the local backend" for name in unused]


def mistyped_variables(environ: Mapping[str, str]) -> list[str]:
    """One sentence per variable whose name is almost that of a setting.

    Others may belong to another program: a variable that resembles no setting is not reported.
    """
    known = {variable(name) for name in SETTINGS}
    found = []
    for given in sorted(environ):
        if given.startswith(_PREFIX) and given not in known and given not in OTHER_VARIABLES:
            near = nearest(given, known, cutoff=0.8)
            if near:
                found.append(f"{given[:MAX_SHOWN]} is not a setting and has no effect; did you mean {near}?")
    return found


def read_private_key(value: str) -> str:
    """The private key of a GitHub App: the PEM text itself, or the content of the file at that path.

    Errors never quote the value.
    """
    if not value or _PEM in value:
        return value
    field = variable("github_app_key")
    try:
        text = Path(value).expanduser().read_text(encoding="ascii")
    except (OSError, ValueError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise UserError(
            f"github-app-key is neither PEM text nor the path of a readable file: {reason}",
            field=field,
            fix="give PEM text, the path of a PEM file, or the ARN of a secret",
        ) from None
    if _PEM not in text:
        raise UserError(
            "github-app-key names a file that is not PEM",
            field=field,
            fix="give the path of the private key that GitHub generated (.pem)",
        )
    return text
