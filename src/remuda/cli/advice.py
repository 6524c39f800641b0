"""Commands that the command line advises: complete, so that they work when pasted."""

from __future__ import annotations

import shlex
from collections.abc import Collection

from remuda.config.declaration import flag
from remuda.config.settings import SETTINGS, Settings


def command_line(settings: Settings, command: str, *arguments: str, omitted: Collection[str] = ()) -> str:
    """A command for the shell, with the flags of the present one that it takes, too.

    Example: after `remuda run-workflow ci.yml --dir state`, the status is that of `remuda status --dir state`. Values
    of the environment and of the settings file are left out, because they apply to the pasted command as well.
    """
    return shlex.join(["remuda", command, *arguments, *repeated_flags(settings, command, omitted=omitted)])


def repeated_flags(settings: Settings, command: str, *, omitted: Collection[str] = ()) -> list[str]:
    words = ["--config", settings.file] if settings.file else []
    for name, origin in settings.origins.items():
        declared = SETTINGS[name]
        if origin != flag(name) or name in omitted or command not in declared.commands:
            continue
        words += [origin] if declared.kind.is_boolean else [origin, str(settings.written[name])]
    return words
