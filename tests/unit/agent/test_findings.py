"""What a reset tells: whole where it fits, bounded where it does not, and never what a job would have us print."""

from __future__ import annotations

import pytest

from remuda.agent.findings import MAX_DETAIL, Finding, Kind, counts, tell


def found(kind: Kind, *names: str) -> list[Finding]:
    return [Finding(kind=kind, name=name) for name in names]


def test_what_was_found_is_told_by_kind_with_counts_and_names() -> None:
    findings = [
        *found(Kind.FILE, "/tmp/b"),  # noqa: S108 - a name
        *found(Kind.PROCESS, "sleep 1", "sleep 2", "sleep 3", "sleep 4"),
        *found(Kind.CRONTAB, "remuda-job"),
    ]
    assert tell(findings) == (
        "4 processes (sleep 1, sleep 2, sleep 3 and 1 more), 1 file elsewhere (/tmp/b), 1 crontab (remuda-job)"
    )
    assert counts(findings) == {"processes": 4, "files elsewhere": 1, "crontabs": 1}


def test_nothing_is_told_too() -> None:
    assert (tell([]), counts([])) == ("nothing was left", {})


def test_a_long_story_is_cut_after_its_counts() -> None:
    findings = [item for kind in Kind for item in found(kind, *["x" * 200] * 10)]
    story = tell(findings)
    assert len(story) == MAX_DETAIL
    assert all(f"10 {kind.plural}" in story for kind in Kind)


@pytest.mark.parametrize("name", ["new\nline", "\x1b[2J", "\udcff\udcfe", "\u202e reversed", "\x00"])
def test_names_are_the_jobs_and_may_be_anything(name: str) -> None:
    assert tell(found(Kind.HOME, name)).isprintable()
    assert tell(found(Kind.HOME, *[name * 500] * 3)).isprintable()


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/dev/shm/x", Kind.SHARED_MEMORY),  # noqa: S108 - a name
        ("/dev/mqueue/x", Kind.QUEUE),
        ("/var/spool/cron/crontabs/x", Kind.CRONTAB),
        ("/var/spool/cron/atjobs/x", Kind.AT_JOB),
        ("/var/spool/at/x", Kind.AT_JOB),
        ("/var/mail/x", Kind.MAIL),
        ("/tmp/x", Kind.FILE),  # noqa: S108 - a name
    ],
)
def test_a_file_is_told_by_where_it_lay(path: str, kind: Kind) -> None:
    assert Finding.file(path).kind is kind
