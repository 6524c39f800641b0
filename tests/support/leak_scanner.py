"""A scanner for leaked credentials: plain, encoded, escaped, wrapped or truncated."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

#: Characters of a credential whose appearance counts as a leak: too many to match by chance.
PIECE = 16
#: Step in characters between two compared positions. A leak of at least PIECE + STRIDE characters is always found.
STRIDE = 4
#: Shorter than the life of any process that receives a credential.
POLL_S = 0.1
LIMIT_S = 60.0
CHUNK = 64 * 1024
_BLANKS = re.compile(rb"\s+")
_PEM_FRAME = re.compile(r"-----[A-Z ]+-----")


@dataclass(frozen=True, kw_only=True)
class Leak:
    """A credential found in some form at a place where it does not belong."""

    name: str
    form: str
    place: str


def _pieces(text: str) -> Iterator[str]:
    for start in range(len(text) - PIECE + 1):
        yield text[start : start + PIECE]


def _forms(secret: str) -> Iterator[tuple[str, str]]:
    yield "plain", secret
    yield "url", quote(secret, safe="")
    yield "json", json.dumps(secret)[1:-1]
    yield "hex", secret.encode().hex()
    for shift in range(3):
        # The encoding depends on the position modulo 3, and the characters at both ends on their neighbours.
        encoded = base64.b64encode(b"\0" * shift + secret.encode()).decode().rstrip("=")
        middle = encoded[2 if shift else 0 : -1]
        yield "base64", middle
        yield "base64", middle.replace("+", "-").replace("/", "_")


class LeakScanner:
    def __init__(self, secrets: Mapping[str, str] | None = None) -> None:
        self._names: dict[bytes, tuple[str, str]] = {}
        self.secrets: dict[str, str] = {}
        for name, secret in (secrets or {}).items():
            self.add(name, secret)

    def add(self, name: str, secret: str) -> str:
        """Add a credential and return it. The header, footer and line breaks of a PEM key are not secret."""
        self.secrets[name] = secret
        bare = "".join(_PEM_FRAME.sub("", secret).split())
        if len(bare) < PIECE + STRIDE:
            raise ValueError(f"{name} is too short: it could match by chance")
        for form, text in _forms(bare):
            for piece in _pieces(text):
                self._names.setdefault(piece.encode(), (name, form))
        return secret

    def add_new(self, found: Iterable[tuple[str, str]]) -> None:
        """Add those credentials, given as kind and value, that are new."""
        for kind, secret in found:
            if secret not in self.secrets.values():
                self.add(f"{kind} {len(self.secrets)}", secret)

    def find(self, content: str | bytes, place: str) -> list[Leak]:
        """Find leaks in a text, ignoring line breaks and blanks, escaped ones too."""
        data = content.encode(errors="surrogateescape") if isinstance(content, str) else content
        bare = _BLANKS.sub(b"", data.replace(b"\\n", b"").replace(b"\0", b""))
        starts = range(0, max(len(data), len(bare)), STRIDE)
        windows = (text[start : start + PIECE] for text in (data, bare) for start in starts)
        found = {self._names[window] for window in windows if window in self._names}
        return [Leak(name=name, form=form, place=place) for name, form in sorted(found)]

    def find_all(self, contents: Mapping[str, str | bytes]) -> list[Leak]:
        return [leak for place, content in contents.items() for leak in self.find(content, place)]


@dataclass(kw_only=True)
class ObservedProcesses:
    """Command lines and environments of all processes of this computer during an observation."""

    #: By kind ("argv", "environ") and content: the user ids that had it, and a command line to identify it.
    seen: dict[tuple[str, bytes], tuple[set[int], str]] = field(default_factory=dict)
    polls: int = 0

    def poll(self) -> None:
        """Read all processes. Runs ten times per second, hence without the overhead of `Path`."""
        self.polls += 1
        for pid in filter(str.isdecimal, os.listdir("/proc")):  # noqa: PTH208
            try:
                uid = os.stat(f"/proc/{pid}").st_uid  # noqa: PTH116
                before = _read(f"/proc/{pid}/cmdline")
                environ = _read(f"/proc/{pid}/environ")
                argv = _read(f"/proc/{pid}/cmdline")
            except OSError:
                continue
            # If the process executed another program meanwhile, the next poll assigns its environment.
            other = ("environ", environ) if argv == before else ("argv", before)
            for kind, content in (("argv", argv), other):
                if content:
                    users, _ = self.seen.setdefault((kind, content), (set(), argv[:200].decode(errors="replace")))
                    users.add(uid)

    def argv(self) -> dict[str, bytes]:
        # A copy, because another thread may be reading processes.
        seen = list(self.seen.items())
        return {f"argv of {command!r}": data for (kind, data), (_, command) in seen if kind == "argv"}

    def environ_of(self, users: Iterable[int]) -> dict[str, bytes]:
        wanted = set(users)
        return {
            f"environ of {command!r}": data
            for (kind, data), (uids, command) in self.seen.items()
            if kind == "environ" and uids & wanted
        }


def _read(path: str) -> bytes:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return b"".join(iter(lambda: os.read(descriptor, CHUNK), b""))
    finally:
        os.close(descriptor)


def key_pair() -> tuple[str, str]:
    """The private and the public key of a GitHub App."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
    return private, key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()


def issued_credentials(github: Path) -> list[tuple[str, str]]:
    """Kind and value of each valid credential that the fake GitHub in this folder has issued: tokens for registration,
    removal and installations, and the secrets of runners.
    """
    (path,) = github.glob("*.db")
    with contextlib.closing(sqlite3.connect(path, timeout=LIMIT_S)) as database:
        rows = database.execute("SELECT kind, key, body FROM document WHERE kind IN ('token', 'runner')").fetchall()
    documents = [(kind, key, json.loads(body)) for kind, key, body in rows]
    return [
        (f"{document['kind']} token", key) if kind == "token" else ("secret of a runner", document["secret"])
        for kind, key, document in documents
    ]


@contextmanager
def observe_processes(request: Path | None = None) -> Iterator[ObservedProcesses]:
    """Read all processes until the block ends. However loaded the computer is, a process can make sure that it is
    read: it creates the file `request`, which is removed after a complete reading.
    """
    processes, ended = ObservedProcesses(), threading.Event()

    def watch() -> None:
        while not ended.wait(POLL_S):
            is_requested = request is not None and request.exists()
            processes.poll()
            if request is not None and is_requested:
                request.unlink(missing_ok=True)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield processes
    finally:
        ended.set()
        thread.join()
