"""The commands of remuda in the script of a workflow's step, such as `provision` in `label=$(remuda provision)`."""

from __future__ import annotations

import re
from collections.abc import Iterator

from remuda.config.declaration import ALL_COMMANDS

_WORD = r"""(?:'[^']*'|"(?:\\.|[^"\\])*"|\\.|[^\s;&|()`])+"""
#: A comment, a word with its quotes, or what separates two commands. A quote that is never closed is a letter.
_TOKEN = re.compile(rf"(?P<comment>(?<![^\s;&|()`])\#.*)|(?P<word>{_WORD})|(?P<end>[;&|()`]+)")
_QUOTED = re.compile(r'"((?:\\.|[^"\\])*)"')
_SUBSTITUTION = re.compile(r"\$\(([^()]*)\)|`([^`]*)`")


def runs_remuda(script: str, command: str) -> bool:
    """Whether the script runs this command of remuda. Texts in quotes and comments run nothing."""
    return command in remuda_commands(script)


def remuda_commands(script: str) -> Iterator[str]:
    """Each command that follows `remuda`, without its options: `release` for `python3 -m remuda --dir x release`."""
    for line in script.replace("\\\n", " ").splitlines():
        is_remuda = False
        for token in _TOKEN.finditer(line):
            word = token["word"] or ""
            for text in _QUOTED.findall(word):
                for found in _SUBSTITUTION.finditer(text):
                    yield from remuda_commands(found[1] or found[2] or "")
            if token["end"]:
                is_remuda = False
            elif is_remuda and word in ALL_COMMANDS:
                yield word
                is_remuda = False
            elif word.strip("'\"").rpartition("/")[2] == "remuda":
                is_remuda = True
