"""Trust, repository and label of a run from its environment and its event payload."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from remuda.cli import lifecycle
from remuda.cli.lifecycle import check_label, read_event, repository, trust
from remuda.config.settings import Settings
from remuda.config.sources import load
from remuda.domain.errors import UserError
from remuda.domain.resources import Tier
from remuda.domain.trust import UnreadablePayload

FORK = {
    "pull_request": {"number": 3, "head": {"repo": {"full_name": "eve/r"}}, "base": {"repo": {"full_name": "octo/r"}}}
}


def loaded(flags: dict[str, str] | None = None, **environ: str) -> Settings:
    return load(flags or {}, environ=environ, file=Path(os.devnull))


def test_the_event_determines_the_tier(tmp_path: Path) -> None:
    file = tmp_path / "event.json"
    file.write_text(json.dumps(FORK))
    found = trust(loaded(GITHUB_EVENT_NAME="pull_request", GITHUB_EVENT_PATH=str(file)))
    assert (found.tier, found.why) == (Tier.UNTRUSTED, "pull request #3 from fork eve/r")


@pytest.mark.parametrize("source", ["flag", "variable"])
def test_a_tier_above_the_event_is_rejected_by_its_source(tmp_path: Path, source: str) -> None:
    file = tmp_path / "event.json"
    file.write_text(json.dumps(FORK))
    environ = {"GITHUB_EVENT_NAME": "pull_request", "GITHUB_EVENT_PATH": str(file)}
    flags = {"tier": "trusted"} if source == "flag" else {}
    with pytest.raises(UserError, match="from fork eve/r") as refused:
        trust(loaded(flags, **environ, **({} if flags else {"REMUDA_TIER": "trusted"})))
    assert refused.value.field == ("--tier" if source == "flag" else "REMUDA_TIER")


def test_without_an_event_the_default_tier_is_trusted() -> None:
    assert trust(loaded()).tier is Tier.TRUSTED
    assert trust(loaded({"tier": "untrusted"})).tier is Tier.UNTRUSTED


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "\xff\xfe", '{"a": ' * 100_000, "null", "7"])
def test_an_invalid_payload_is_untrusted(tmp_path: Path, text: str) -> None:
    file = tmp_path / "event.json"
    file.write_bytes(text.encode("latin-1"))
    found = trust(loaded(GITHUB_EVENT_NAME="pull_request", GITHUB_EVENT_PATH=str(file)))
    assert found.tier is Tier.UNTRUSTED


def test_a_pipe_or_a_huge_file_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert read_event(str(tmp_path / "pipe")).why == "not a regular file"
    assert isinstance(read_event(str(tmp_path)), UnreadablePayload)
    assert isinstance(read_event(""), UnreadablePayload)
    assert isinstance(read_event("a\0b"), UnreadablePayload)
    monkeypatch.setattr(lifecycle, "MAX_EVENT_BYTES", 10)
    (tmp_path / "long").write_text('{"a": "01234567890"}')
    assert read_event(str(tmp_path / "long")).why == "larger than 10 bytes"


@pytest.mark.parametrize(
    ("text", "cause"), [(None, "No such file or directory"), ("{", "not JSON"), ("[]", "not a JSON object")]
)
def test_an_unreadable_payload_is_reported_with_its_cause(tmp_path: Path, text: str | None, cause: str) -> None:
    file = tmp_path / "event.json"
    if text is not None:
        file.write_text(text)
    environ = {"GITHUB_EVENT_NAME": "pull_request", "GITHUB_EVENT_PATH": str(file)}
    why = trust(loaded(None, **environ)).why
    assert why == f"event pull_request, whose payload cannot be read: {str(file)[:120]}: {cause}"
    with pytest.raises(UserError, match=cause) as refused:
        trust(loaded({"tier": "trusted"}, **environ))
    assert str(file)[:120] in refused.value.fix
    assert "omit --tier" in refused.value.fix


def test_a_missing_payload_file_names_the_variable() -> None:
    assert trust(loaded(GITHUB_EVENT_NAME="pull_request")).why.endswith("GITHUB_EVENT_PATH is not set")
    # The name of this event is sufficient.
    assert trust(loaded(GITHUB_EVENT_NAME="push")).tier is Tier.TRUSTED


def test_the_repository_comes_from_the_workflow_or_the_scope() -> None:
    assert repository(loaded(GITHUB_REPOSITORY="octo/r")) == "octo/r"
    assert repository(loaded({"github_scope": "octo"}, GITHUB_REPOSITORY="octo/r")) == "octo/r"
    assert repository(loaded({"github_scope": "octo"})) == ""
    # A workflow of another repository may provision runners of this one; they serve only this one.
    assert repository(loaded({"github_scope": "octo/r"}, GITHUB_REPOSITORY="octo/other")) == "octo/r"


@pytest.mark.parametrize("scope", ["octo", "octo/r"])
def test_a_repository_outside_the_scope_is_rejected(scope: str) -> None:
    with pytest.raises(UserError, match="eve/r") as refused:
        repository(loaded({"github_scope": scope, "repository": "eve/r"}))
    assert (refused.value.field, bool(refused.value.fix)) == ("--repository", True)


@pytest.mark.parametrize("text", ["octo", "octo/r/x", "../r", "octo/r\n"])
def test_an_invalid_repository_is_rejected(text: str) -> None:
    with pytest.raises(UserError, match="repository"):
        loaded({"repository": text})


def test_a_payload_without_an_event_name_is_untrusted(tmp_path: Path) -> None:
    file = tmp_path / "event.json"
    file.write_text(json.dumps(FORK))
    assert trust(loaded(GITHUB_EVENT_PATH=str(file))).tier is Tier.UNTRUSTED


@pytest.mark.parametrize("run_id", ["build-12", "12x", "large"])
def test_in_a_workflow_a_label_without_the_run_number_is_rejected(run_id: str) -> None:
    with pytest.raises(UserError, match=run_id) as refused:
        check_label(run_id, environ={"GITHUB_RUN_ID": "12"}, field="--run-id")
    assert (refused.value.field, bool(refused.value.fix)) == ("--run-id", True)
    check_label(run_id, environ={}, field="--run-id")


@pytest.mark.parametrize("run_id", ["12", "12-large", "12.a", "12_a", "99"])
def test_labels_that_begin_with_the_run_number_are_accepted(run_id: str) -> None:
    check_label(run_id, environ={"GITHUB_RUN_ID": "12"}, field="--run-id")
