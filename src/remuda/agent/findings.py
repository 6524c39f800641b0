"""What a reset found and removed, told in one bounded line: by kind, with counts and the first few names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

MAX_DETAIL = 500
#: Names in the detail, of each kind.
MAX_NAMED = 3
MAX_NAME = 80
NOTHING = "nothing was left"


class Kind(StrEnum):
    """One of it, in words; more of it are named by their plural."""

    PROCESS = "process"
    HOME = "file in home"
    WORK = "file in work"
    TMP = "file in temp"
    RUNNER = "changed runner file"
    FILE = "file elsewhere"
    SHARED_MEMORY = "file in shared memory"
    QUEUE = "message queue"
    CRONTAB = "crontab"
    AT_JOB = "at job"
    MAIL = "mailbox"
    LOGIN = "lasting login"
    SYSTEM_V = "IPC object"
    KEY = "kernel key"
    RECORD = "system record"
    UNFINISHED = "unfinished removal"

    @property
    def plural(self) -> str:
        if self in {Kind.PROCESS, Kind.MAIL}:
            return f"{self.value}es"
        noun, of, place = self.value.partition(" in ")
        noun, elsewhere, _ = noun.partition(" elsewhere")
        return f"{noun}s{of}{place}{elsewhere}"


#: Folders by which a file is told; the first that holds it.
_PLACES = (
    ("/dev/shm/", Kind.SHARED_MEMORY),  # noqa: S108 - a name
    ("/dev/mqueue/", Kind.QUEUE),
    ("/var/spool/cron/atjobs/", Kind.AT_JOB),
    ("/var/spool/cron/atspool/", Kind.AT_JOB),
    ("/var/spool/at/", Kind.AT_JOB),
    ("/var/spool/cron/", Kind.CRONTAB),
    ("/var/mail/", Kind.MAIL),
    ("/var/spool/mail/", Kind.MAIL),
)


#: What the runner itself makes for every job, and the notes of the hook, which are told apart. They go like all else.
_USUAL = {
    Kind.RUNNER: frozenset({"_diag", "_work"}),
    Kind.WORK: frozenset({"_PipelineMapping", "_actions", "_temp", "_tool", ".remuda-refused"}),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    kind: Kind
    #: The job chose it: it may hold anything.
    name: str

    @property
    def is_usual(self) -> bool:
        """Whether it is there after any job, and so not worth a word."""
        return self.name in _USUAL.get(self.kind, ())

    @classmethod
    def file(cls, path: str) -> Finding:
        return cls(kind=next((kind for start, kind in _PLACES if path.startswith(start)), Kind.FILE), name=path)


def counts(findings: Iterable[Finding]) -> Mapping[str, int]:
    """How many of each kind, in the order of the kinds."""
    found = list(findings)
    every = ((kind.plural, sum(item.kind is kind for item in found)) for kind in Kind)
    return {name: number for name, number in every if number}


def tell(findings: Iterable[Finding]) -> str:
    """Such as: 2 processes (sleep 1, sleep 2), 1 crontab (remuda-job). Where that is too long, counts stand first."""
    names: dict[Kind, list[str]] = {}
    for item in findings:
        names.setdefault(item.kind, []).append(item.name)
    told = [(kind, names[kind]) for kind in Kind if kind in names]
    full = ", ".join(f"{_count(kind, found)} ({some(found)})" for kind, found in told)
    if len(full) <= MAX_DETAIL:
        return full or NOTHING
    return printable(", ".join(_count(kind, found) for kind, found in told) + f": {full}", MAX_DETAIL)


def _count(kind: Kind, names: Sequence[str]) -> str:
    return f"{len(names)} {kind.value if len(names) == 1 else kind.plural}"


def some(names: Sequence[str]) -> str:
    """The first few, and how many there are."""
    shown = ", ".join(printable(name, MAX_NAME) for name in names[:MAX_NAMED])
    return shown if len(names) <= MAX_NAMED else f"{shown} and {len(names) - MAX_NAMED} more"


def printable(text: str, most: int) -> str:
    return (text if text.isprintable() else text.encode("unicode_escape", "surrogatepass").decode("ascii"))[:most]
