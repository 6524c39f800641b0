"""Advised commands with the flags of the present command, and texts in which commands are only mentioned."""

from __future__ import annotations

from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from remuda.cli import read
from remuda.cli.advice import complete_commands
from remuda.cli.output import Output
from remuda.config.settings import Settings
from remuda.config.sources import load
from remuda.controlplane.read.status import Status
from remuda.domain.reporting.warnings import PoolWarning, WarningKind
from tests.support.records import NOW


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return load({"dir": str(tmp_path / "state")}, environ={})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("run remuda listen", "run remuda listen{}"),
        ("run remuda listen --dir other", "run remuda listen --dir other"),
        (
            "start remuda listen: see remuda explain x --dir other",
            "start remuda listen{}: see remuda explain x --dir other",
        ),
        (
            "GitHub's or the sets' job: run remuda up: it's ours",
            "GitHub's or the sets' job: run remuda up{}: it's ours",
        ),
        (
            "with 'remuda status --wide', or 'remuda explain x'",
            "with 'remuda status{} --wide', or 'remuda explain{} x'",
        ),
        (
            """remuda refresh --runner-sets '[{"labels": ["remuda refresh", "it'"'"'s remuda up"]}]'""",
            """remuda refresh{} --runner-sets '[{"labels": ["remuda refresh", "it'"'"'s remuda up"]}]'""",
        ),
        ("job 'a remuda up' waits: run remuda up", "job 'a remuda up' waits: run remuda up{}"),
    ],
)
def test_commands_become_complete(settings: Settings, text: str, expected: str) -> None:
    assert complete_commands(text, settings) == expected.replace("{}", f" --dir {settings.written['dir']}")


class Ended(Exception):
    pass


@pytest.mark.parametrize("watch", [True, False])
def test_status_shows_complete_commands(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *, watch: bool
) -> None:
    warning = PoolWarning(kind=WarningKind.STOPPED_PROCESS, subject="", text="run remuda refresh to sweep")

    class Clock:
        def monotonic(self) -> float:
            return 0.0

        async def sleep(self, _seconds: float) -> None:
            raise Ended

    class Context:
        clock = Clock()

    @asynccontextmanager
    async def open_context(*_given: Any, **_more: Any) -> Any:
        yield Context()

    async def status(*_given: Any, **_more: Any) -> Status:
        return Status(at=NOW, pool="p", config=None, instances=(), reports={}, pools={}, runs=(), warnings=(warning,))

    monkeypatch.setattr(read, "open_context", open_context)
    monkeypatch.setattr(read, "status", status)
    monkeypatch.setattr(read, "stopped_processes", lambda _settings: [])
    monkeypatch.setattr(read, "_disk_warnings", lambda _settings: [])
    monkeypatch.setattr(Output, "settings", settings)
    output = Output(as_json=True)
    try:
        read.run_status(settings, output, everything=False, watch=watch, every=None)
    except Ended:
        assert watch
    assert f"--dir {settings.written['dir']} to sweep" in capsys.readouterr().out
