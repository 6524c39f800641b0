"""Help and shell completion; arguments of drain, quarantine and terminate."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from click import Context
from click.testing import CliRunner

from remuda.cli.main import COMMAND_SECTIONS, app, install_completion, main
from remuda.cli.operator import check_reason, check_selection, run_terminate
from remuda.cli.output import Output
from remuda.cli.read import parse_since
from remuda.config.declaration import ALL_COMMANDS, flag
from remuda.config.settings import SETTINGS, Settings
from remuda.controlplane.operator import InstanceSelector
from remuda.domain.errors import UserError
from tests.support.records import NOW

SHELLS = ("bash", "zsh", "fish")


def shown_help(*command: str) -> str:
    result = CliRunner().invoke(app, [*command, "--help"], terminal_width=80)
    assert result.exit_code == 0
    return result.output


def test_settings_name_exactly_the_commands_that_exist() -> None:
    assert set(ALL_COMMANDS) == set(app.commands)
    assert {command for declared in SETTINGS.values() for command in declared.commands} <= set(app.commands)


@pytest.mark.parametrize("command", ["", *ALL_COMMANDS])
def test_help_fits_80_columns_and_cuts_no_sentence(command: str) -> None:
    text = shown_help(*command.split())
    assert all(len(line) <= 80 for line in text.splitlines())
    assert not re.search(r"\w\.\.\.", text)


@pytest.mark.parametrize("command", ALL_COMMANDS)
def test_help_shows_type_and_default_of_every_flag(command: str) -> None:
    # Without white space: lines may break anywhere, also after a hyphen.
    text = "".join(shown_help(command).split())
    for declared in SETTINGS.values():
        if command in declared.commands:
            expected = f"{flag(declared.name)}{declared.kind.metavar}{declared.help}"
            assert "".join(expected.split()) in text


def test_help_groups_options() -> None:
    titles = [line for line in shown_help("refresh").splitlines() if re.fullmatch(r"\S.*:", line)]
    assert titles == ["Options:", "Pool:", "AWS:", "GitHub:", "Common:", "Output:"]
    assert "--usage-class [on-demand|spot]" in shown_help("provision")
    assert "--idle-time-sec DURATION" in shown_help("refresh")


def test_expert_settings_have_no_flag() -> None:
    experts = {"margin_sec", "unrecorded_grace_sec", "stale_registration_grace_sec", "gone_after_sec", "republish_sec"}
    experts |= {"keep_records_sec", "boot_delay_sec", "fault", "github_token", "github_app_key"}
    assert not [name for name in experts if SETTINGS[name].commands]


@pytest.mark.parametrize("shell", SHELLS)
def test_show_completion_prints_the_script_of_the_shell(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--show-completion", shell]) == 0
    assert f"_REMUDA_COMPLETE={shell}_complete" in capsys.readouterr().out


def test_completion_of_an_unknown_shell_is_rejected(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHELL", "/bin/tcsh")
    for arguments in (["--show-completion", "tcsh"], ["--install-completion"]):
        assert main(arguments) == 2
        assert "must be bash, zsh or fish, got 'tcsh'" in capsys.readouterr().err


@pytest.mark.parametrize("shell", SHELLS)
def test_install_completion_twice_changes_nothing(shell: str, tmp_path: Path) -> None:
    startup_file = tmp_path / f".{shell}rc"
    startup_file.write_text("alias ll='ls -l'\n")
    file = install_completion(app, shell, tmp_path)
    before = startup_file.read_text()
    assert "_REMUDA_COMPLETE" in file.read_text()
    assert before.startswith("alias ll")
    assert (file.name in before) == (shell != "fish")
    assert install_completion(app, shell, tmp_path) == file
    assert startup_file.read_text() == before


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(
    ("words", "expected"), [("remuda pro", "provision"), ("remuda provision --usage-class sp", "spot")]
)
def test_completion_completes_commands_and_choices(shell: str, words: str, expected: str) -> None:
    environment = {**os.environ, "_REMUDA_COMPLETE": f"{shell}_complete", "COMP_WORDS": words}
    environment["COMP_CWORD"] = words.rsplit(maxsplit=1)[-1] if shell == "fish" else str(len(words.split()) - 1)
    done = subprocess.run(
        [sys.executable, "-m", "remuda"], env=environment, capture_output=True, text=True, check=False
    )
    assert expected in done.stdout


# Drain, quarantine and terminate check their arguments before any record is read --------------------------------------


ONE = InstanceSelector(instance_ids=("i-0123456789abcdef0",))


@pytest.mark.parametrize(
    "selector",
    [
        ONE,
        InstanceSelector(everything=True),
        InstanceSelector(resource_class="large"),
        InstanceSelector(ami="ami-01234567"),
    ],
)
def test_ids_or_a_filter_are_accepted(selector: InstanceSelector) -> None:
    assert check_selection(selector) is selector


@pytest.mark.parametrize(
    "selector",
    [
        InstanceSelector(),
        InstanceSelector(instance_ids=("i-1; rm",)),
        InstanceSelector(instance_ids=ONE.instance_ids, everything=True),
        InstanceSelector(instance_ids=ONE.instance_ids, ami="ami-01234567"),
    ],
)
def test_a_missing_or_ambiguous_selection_is_rejected(selector: InstanceSelector) -> None:
    with pytest.raises(UserError) as failure:
        check_selection(selector)
    assert (failure.value.field, bool(failure.value.fix)) == ("INSTANCE", True)


@pytest.mark.parametrize("arguments", [("quarantine", "i-0123456789abcdef0", "--for"), ("dashboard", "--since")])
@pytest.mark.parametrize("duration", ["", "0h", "31d", "soon", "1e9h", "99999999h"])
def test_a_command_rejects_an_invalid_duration(
    arguments: tuple[str, ...], duration: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, duration]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"remuda: {arguments[-1]} must be a number of seconds from 1 to ")
    assert "or a time such as 90s, 30m or 7d, got " in error


def test_every_command_is_in_one_section_of_the_help() -> None:
    assert sorted(name for names in COMMAND_SECTIONS.values() for name in names) == sorted(app.commands)
    lines = app.get_help(Context(app, info_name="remuda")).splitlines()
    assert [line[:-1] for line in lines if line.endswith(":") and not line.startswith(" ")] == [
        "Options",
        *COMMAND_SECTIONS,
    ]


@pytest.mark.parametrize(("text", "days"), [("7d", 7), ("12h", 0.5), ("86400", 1), ("2025-05-30", 1.5)])
def test_begin_of_a_report(text: str, days: float) -> None:
    assert parse_since(text, now=NOW) == NOW - timedelta(days=days)


@pytest.mark.parametrize("reason", ["x" * 201, "two\nlines", "\x1b[2J"])
def test_a_reason_of_several_lines_is_rejected(reason: str) -> None:
    with pytest.raises(UserError) as failure:
        run_terminate(
            Settings(),
            Output(as_json=False),
            instances=ONE.instance_ids,
            everything=False,
            reason=reason,
            dry_run=False,
            confirmed=True,
        )
    assert failure.value.field == "--reason"


def test_an_empty_reason_is_replaced() -> None:
    assert check_reason(" ") == "no reason given"
