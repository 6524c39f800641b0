"""Commands that the command line advises: complete, so that they work when pasted."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection

from remuda.config.declaration import ALL_COMMANDS, flag
from remuda.config.settings import SETTINGS, Settings

#: Settings that say which pool a command means.
POOL_FLAGS = ("backend", "dir", "pool")
#: A text in quotes, such as the label of a job, or a command, which may be in quotes itself.
_QUOTED = r"""(?<!\w)(?:'(?!remuda )[^']*'|"(?!remuda )[^"]*")"""
_COMMAND = re.compile(rf"{_QUOTED}|\bremuda ({'|'.join(sorted(ALL_COMMANDS, key=len, reverse=True))})(?![\w.-])")


def command_line(settings: Settings, command: str, *arguments: str, omitted: Collection[str] = ()) -> str:
    """A command for the shell, with the flags of the present one that it takes, too.

    Example: after `remuda run-workflow ci.yml --dir state`, the same workflow is `remuda run-workflow ci.yml --dir
    state`. Values of the environment and of the default settings file apply to the pasted command as well.
    """
    taken = {name for name in settings.origins if command in SETTINGS[name].commands and name not in omitted}
    return shlex.join(["remuda", command, *arguments, *_repeated_flags(settings, taken, arguments)])


def complete_commands(text: str, settings: Settings) -> str:
    """Add the flags that name the pool to the commands of a text, as in `run remuda refresh --dir state`.

    Texts of the domain name commands without them, because only the command line knows the flags. What is in quotes is
    no command, unless the quotes are around it: `'remuda status --wide'`.
    """

    def complete(found: re.Match[str]) -> str:
        if found[1] is None:
            return found[0]
        taken = {name for name in POOL_FLAGS if found[1] in SETTINGS[name].commands}
        end = next((other.start() for other in _COMMAND.finditer(text, found.end()) if other[1]), len(text))
        flags = _repeated_flags(settings, taken, text[found.end() : end].split())
        return shlex.join([*found[0].split(), *flags])

    return _COMMAND.sub(complete, text)


def _repeated_flags(settings: Settings, names: Collection[str], given: Collection[str]) -> list[str]:
    words = ["--config", settings.file] if settings.file and "--config" not in given else []
    for name, origin in settings.origins.items():
        if origin == flag(name) and name in names and origin not in given:
            words += [origin] if SETTINGS[name].kind.is_boolean else [origin, str(settings.written[name])]
    return words
