"""Shell completion: `--install-completion` and `--show-completion` for bash, zsh and fish."""

from __future__ import annotations

import os
from pathlib import Path

import click
from click.shell_completion import get_completion_class

from remuda.config.kinds import choice
from remuda.domain.errors import UserError

PROGRAM = "remuda"
#: If it is set, click answers the shell's request for completions and exits.
VARIABLE = "_REMUDA_COMPLETE"
SHELLS = choice(("bash", "zsh", "fish"))
CURRENT = "current"


def completion_script(app: click.Command, shell: str) -> str:
    completion = get_completion_class(shell)
    if completion is None:
        raise UserError(f"there is no completion for {shell!r}", field="--show-completion", fix="use bash, zsh or fish")
    return completion(app, {}, PROGRAM, VARIABLE).source()


def install_completion(app: click.Command, shell: str, home: Path) -> Path:
    """Write the completion script and make the shell load it. Idempotent."""
    script = completion_script(app, shell)
    if shell == "fish":
        file = home / ".config" / "fish" / "completions" / f"{PROGRAM}.fish"
    else:
        file = home / f".{PROGRAM}-complete.{shell}"
        _append_once(home / f".{shell}rc", f". ~/{file.name}")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(script + "\n", encoding="utf-8")
    return file


def _append_once(file: Path, line: str) -> None:
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    if line not in text.splitlines():
        file.write_text(f"{text.rstrip()}\n{line}\n".lstrip(), encoding="utf-8")


def shell_of(value: str, field: str) -> str:
    """The named shell, or the login shell for `current`."""
    name = Path(os.environ.get("SHELL", "")).name if value == CURRENT else value
    if name not in SHELLS.choices:
        raise UserError(f"{field} must be {SHELLS.expected}, got {name[:20]!r}", field=field)
    return name
