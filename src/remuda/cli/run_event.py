"""What a workflow tells about its run: the event that started it, and with it how far its code is trusted."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from remuda.config.settings import Loaded
from remuda.domain.errors import UserError
from remuda.domain.resources import repository_of
from remuda.domain.text import truncate
from remuda.domain.trust import Trust, Unread, decide

#: Stands for the name of an event of which only the file is known.
NAMELESS = "(none)"
_OF_A_RUN = re.compile(r"[0-9]+([._-]|$)")
#: GitHub keeps a payload below 25 MB.
MAX_EVENT_BYTES = 32 * 1024 * 1024
#: How much of a path a reason repeats.
MAX_SHOWN = 120


def trust(loaded: Loaded) -> Trust:
    settings = loaded.settings
    asked = settings.tier if loaded.given("tier") else None
    # A file without a name is of some event, too.
    event = settings.event_name or (NAMELESS if settings.event_path else "")
    payload = read_event(settings.event_path) if event else None
    with _named(loaded):
        return decide(event, payload, asked)


def check_label(run_id: str, *, environ: Mapping[str, str], field: str) -> None:
    """In a workflow: a machine refuses jobs whose run's number its label does not begin with. Another label would have
    machines paid for that no job may use.
    """
    if environ.get("GITHUB_RUN_ID") and not _OF_A_RUN.match(run_id):
        raise UserError(
            f"{field} is {run_id!r}, which begins with no run's number",
            field=field,
            fix="give github.run_id, or more after it: 123-large",
        )


def repository(loaded: Loaded) -> str:
    """The run's, or empty. A runner of a repository serves that one, whatever workflow asks for it."""
    settings = loaded.settings
    with _named(loaded):
        known = repository_of(settings.github_scope, settings.repository)
    by_hand = loaded.given("repository") and loaded.origins["repository"] != "GITHUB_REPOSITORY"
    if by_hand and settings.repository and settings.repository.lower() != known.lower():
        raise UserError(
            f"repository is {settings.repository!r}, but the runners register in {settings.github_scope!r}",
            field=loaded.shown("repository"),
            fix="leave --repository out, or give the scope of that repository",
        )
    return known


@contextmanager
def _named(loaded: Loaded) -> Iterator[None]:
    """Errors name their field as the user wrote it."""
    try:
        yield
    except UserError as error:
        raise UserError(error.message, field=loaded.shown(error.field), fix=error.fix) from None


def read_event(path: str) -> Any:
    """The event's payload, or `Unread`: then it is judged by its name alone."""
    if not path:
        return Unread(file="", why="GITHUB_EVENT_PATH names no file")
    shown = truncate(path, MAX_SHOWN)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:  # noqa: PTH123  # a descriptor
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return Unread(file=shown, why="it is no regular file")
            text = file.read(MAX_EVENT_BYTES + 1)
        found = json.loads(text) if len(text) <= MAX_EVENT_BYTES else None
    except OSError as problem:
        return Unread(file=shown, why=problem.strerror or "it cannot be opened")
    except (ValueError, RecursionError):
        return Unread(file=shown, why="it is not JSON")
    if len(text) > MAX_EVENT_BYTES:
        return Unread(file=shown, why=f"it has more than {MAX_EVENT_BYTES} bytes")
    return found if isinstance(found, Mapping) else Unread(file=shown, why="it is no JSON object")
