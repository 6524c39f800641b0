"""A fake GitHub for the local backend: the REST API for runners, a job queue, and a fake actions runner.

This module holds the endpoint file, which says where a server listens. It imports the standard library only because
commands that must start quickly read it.
"""

import dataclasses
import json
import os
import pathlib

FILE_NAME = "endpoint.json"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    url: str
    pid: int
    #: The administrator's access token.
    token: str


def read_endpoint(folder: pathlib.Path) -> Endpoint | None:
    """Read the endpoint of the server that uses, or last used, this folder. The server may be down."""
    try:
        document = json.loads((folder / FILE_NAME).read_text())
        return Endpoint(url=str(document["url"]), pid=int(document["pid"]), token=str(document["token"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_endpoint(folder: pathlib.Path, endpoint: Endpoint) -> None:
    """Write the file atomically."""
    draft = folder / f".{FILE_NAME}.{endpoint.pid}"
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(dataclasses.asdict(endpoint), file)
    draft.replace(folder / FILE_NAME)
