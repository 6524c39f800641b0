"""The event that started the run: its payload, the trust that follows from it, and the run's repository."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from remuda.config.settings import Settings
from remuda.domain.errors import UserError
from remuda.domain.resources import repository_of
from remuda.domain.text import truncate
from remuda.domain.trust import Trust, UnreadablePayload, decide_trust

#: Event name if only the payload file is known.
UNNAMED_EVENT = "(none)"
_STARTS_WITH_RUN_NUMBER = re.compile(r"[0-9]+([._-]|$)")
#: GitHub limits a payload to 25 MB.
MAX_EVENT_BYTES = 32 * 1024 * 1024
#: Characters of a path that a reason repeats.
MAX_SHOWN = 120


def trust(settings: Settings) -> Trust:
    requested = settings.tier if settings.given("tier") else None
    # A payload file without an event name still belongs to an event.
    event = settings.event_name or (UNNAMED_EVENT if settings.event_path else "")
    payload = read_event(settings.event_path) if event else None
    with _named(settings):
        return decide_trust(event, payload, requested)


def check_label(run_id: str, *, environ: Mapping[str, str], field: str) -> None:
    """In a workflow, require a label that begins with the run's number.

    Agents refuse jobs of other runs by that number, so instances with another label could not serve any job.
    """
    if environ.get("GITHUB_RUN_ID") and not _STARTS_WITH_RUN_NUMBER.match(run_id):
        raise UserError(
            f"{field} must begin with the run's number, got {run_id!r}",
            field=field,
            fix="give github.run_id, optionally with a suffix: 123-large",
        )


def repository(settings: Settings) -> str:
    """The repository of the run, or empty. A runner that is registered in a repository serves only that one."""
    with _named(settings):
        known = repository_of(settings.github_scope, settings.repository)
    is_explicit = settings.given("repository") and settings.origins["repository"] != "GITHUB_REPOSITORY"
    if is_explicit and settings.repository and settings.repository.lower() != known.lower():
        raise UserError(
            f"repository is {settings.repository!r}, but the runners register in {settings.github_scope!r}",
            field=settings.shown("repository"),
            fix="omit --repository, or give the scope of that repository",
        )
    return known


@contextmanager
def _named(settings: Settings) -> Iterator[None]:
    """Make errors name the setting as the user wrote it."""
    try:
        yield
    except UserError as error:
        raise UserError(error.message, field=settings.shown(error.field.replace("-", "_")), fix=error.fix) from None


def read_event(path: str) -> Any:
    """The event's payload, or `UnreadablePayload` with the reason: then the event's name alone decides the trust."""
    if not path:
        return UnreadablePayload(file="", why="GITHUB_EVENT_PATH is not set")
    shown = truncate(path, MAX_SHOWN)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:  # noqa: PTH123  # a descriptor
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return UnreadablePayload(file=shown, why="not a regular file")
            text = file.read(MAX_EVENT_BYTES + 1)
        found = json.loads(text) if len(text) <= MAX_EVENT_BYTES else None
    except OSError as problem:
        return UnreadablePayload(file=shown, why=problem.strerror or "cannot be opened")
    except (ValueError, RecursionError):
        return UnreadablePayload(file=shown, why="not JSON")
    if len(text) > MAX_EVENT_BYTES:
        return UnreadablePayload(file=shown, why=f"larger than {MAX_EVENT_BYTES} bytes")
    return found if isinstance(found, Mapping) else UnreadablePayload(file=shown, why="not a JSON object")
