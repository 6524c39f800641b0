"""Output of the demo: titles and outcomes by default, everything with --verbose."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from remuda.cli.demo.environment import DemoEnvironment
from remuda.cli.output import Output
from remuda.config.settings import Settings
from remuda.domain.errors import Unavailable
from remuda.wiring.local import layout, local_store


def demo_log(tmp_path: Path, capsys: pytest.CaptureFixture[str], *arguments: str, verbose: bool) -> str:
    """The log of a part of the demo with one command."""
    environment = DemoEnvironment(Output(as_json=False), tmp_path, verbose=verbose)
    asyncio.run(_create_store(environment.settings))
    with environment.live_progress():
        environment.title("Cold: the pool is empty")
        environment.log("something happened")
        asyncio.run(environment.remuda(*arguments))
        environment.outcome("3 created")
    return capsys.readouterr().err


async def _create_store(settings: Settings) -> None:
    """A store, so that `down` finds a backend to stop."""
    layout(settings).root.mkdir(parents=True, exist_ok=True)
    store = local_store(settings)
    await store.prepare()
    await store.close()


def test_default_output_has_titles_and_outcomes_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo_log(tmp_path, capsys, "down", verbose=False) == "Cold: the pool is empty\n  3 created\n"


def test_verbose_shows_commands_and_their_progress(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = demo_log(tmp_path, capsys, "down", verbose=True).splitlines()
    assert lines[:2] == ["", "== Cold: the pool is empty"]
    assert re.fullmatch(r"\d\d:\d\d:\d\d something happened", lines[2])
    assert lines[3:] == ["$ remuda down", "  down: 0 instances terminated, 0 processes left", "  3 created"]


def test_the_output_of_a_failed_command_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Unavailable, match="remuda explain failed with exit code 2"):
        demo_log(tmp_path, capsys, "explain", "set.", verbose=False)
    assert "remuda: " in capsys.readouterr().err
