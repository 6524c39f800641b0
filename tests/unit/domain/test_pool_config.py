from __future__ import annotations

from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remuda.domain.errors import UserError
from remuda.domain.instance import State
from remuda.domain.pool_config import (
    MAX_RUNNER_NAME,
    parse_runner_name,
    runner_name,
    runner_prefix,
    stale_registration_reason,
)
from tests.support.records import NOW, at, in_state, instance_id, pool_config

POOLS = st.from_regex(r"\A[a-z0-9][a-z0-9-]{0,19}\Z")
EPOCHS = st.integers(1, 10**9)
IDS = st.from_regex(r"\Ai-[0-9a-f]{17}\Z")


@given(POOLS, EPOCHS, IDS)
def test_runner_name_contains_pool_epoch_and_instance_and_fits_github(pool: str, epoch: int, machine: str) -> None:
    name = runner_name(pool, epoch, machine)
    assert len(name) <= MAX_RUNNER_NAME
    assert name.startswith(runner_prefix(pool))
    assert parse_runner_name(pool, name) == (epoch, machine)


@given(POOLS, POOLS, EPOCHS, IDS)
def test_runner_belongs_to_one_pool_only(one: str, other: str, epoch: int, machine: str) -> None:
    """Otherwise the sweep of one pool would remove the runners of another."""
    if one != other:
        assert parse_runner_name(other, runner_name(one, epoch, machine)) is None


@pytest.mark.parametrize("epoch", [1, 7])
def test_pool_name_that_extends_another_is_another_pool(epoch: int) -> None:
    assert parse_runner_name("ci", runner_name("ci-1", epoch, instance_id(1))) is None


@pytest.mark.parametrize(
    "name",
    [
        *("", "remuda-test-", "remuda-test-1", "remuda-test-1-", "remuda-test--i-01234567"),
        *("remuda-test-x-i-01234567", "remuda-test-1-my-own-runner", "remuda-test-0-i-01234567"),
        *("remuda-test-01-i-01234567", "remuda-test-1-i-01234567-x", "remuda-test-²-i-01234567"),
        *("Remuda-test-1-i-01234567", "remuda-tests-1-i-01234567", "ubuntu-runner"),
    ],
)
def test_foreign_runner_names_are_not_parsed(name: str) -> None:
    assert parse_runner_name("test", name) is None


def test_runner_name_too_long_for_github_is_rejected() -> None:
    with pytest.raises(UserError, match="longer than 64"):
        runner_name("x" * 30, 10**9, instance_id(1))


def test_unknown_class_error_lists_the_classes() -> None:
    with pytest.raises(UserError, match="'huge'") as refused:
        pool_config().resource_class("huge")
    assert refused.value.field == "resource-class"
    assert "xlarge" in refused.value.fix
    assert pool_config().resource_class("large").cpu == 2


def test_scope_of_tokens_ignores_case() -> None:
    assert pool_config().tokens_for("Octo/Repo").scope == "octo/repo"
    with pytest.raises(UserError, match="octo/other") as refused:
        pool_config().tokens_for("octo/other")
    assert "remuda refresh --github-scope octo/other" in refused.value.fix


def test_repr_hides_tokens() -> None:
    assert "t0ken" not in repr(pool_config())


# Stale registrations ----------------------------------------------------------------------------------------------


def stale_reason(name: str, record_state: State | None, *, epoch: int = 2, since: datetime | None = None) -> str | None:
    record = None if record_state is None else in_state(record_state, epoch=epoch)
    return stale_registration_reason(name, record, pool="test", unrecorded_since=since, now=NOW, grace_s=900.0)


NAME = runner_name("test", 2, instance_id(1))


@pytest.mark.parametrize("state", State)
def test_registration_of_current_epoch_is_stale_only_if_idle_or_terminated(state: State) -> None:
    expected = state in {State.IDLE, State.TERMINATING, State.TERMINATED}
    assert (stale_reason(NAME, state) is not None) is expected


@pytest.mark.parametrize("state", State)
def test_registration_of_an_earlier_epoch_is_stale(state: State) -> None:
    assert stale_reason(NAME, state, epoch=3) is not None


@pytest.mark.parametrize("state", [State.CREATED, State.CLAIMED, State.RUNNING, State.RELEASING, State.IDLE])
def test_registration_newer_than_the_record_is_not_stale(state: State) -> None:
    assert stale_reason(NAME, state, epoch=1) is None


@pytest.mark.parametrize(
    ("since", "expected"), [(None, False), (at(-899.999), False), (at(-900), True), (at(5), False)]
)
def test_registration_without_a_record_is_stale_after_the_grace_period(since: datetime | None, expected: bool) -> None:  # noqa: FBT001
    assert (stale_reason(NAME, None, since=since) is not None) is expected


@pytest.mark.parametrize("name", ["somebodys-runner", runner_name("other", 1, instance_id(1)), "remuda-test-1-mine"])
def test_foreign_runner_is_never_stale(name: str) -> None:
    assert stale_reason(name, None, since=at(-9_999)) is None
    assert stale_reason(name, State.TERMINATED) is None


def test_run_has_a_page_on_its_server() -> None:
    url = pool_config(github_url="https://ghe.acme.example:8443").run_url("octo/app.js", "17534000119")
    assert url == "https://ghe.acme.example:8443/octo/app.js/actions/runs/17534000119"


@pytest.mark.parametrize(
    ("server", "repository", "run_id"),
    [
        ("javascript:alert(1)//github.com", "octo/app", "41"),
        ("ftp://github.com", "octo/app", "41"),
        ('https://github.com"><script>', "octo/app", "41"),
        ("https://user:secret@github.com", "octo/app", "41"),
        ("", "octo/app", "41"),
        # The local GitHub has no web pages.
        ("http://127.0.0.1:4711", "octo/app", "41"),
        ("https://github.com", "", "41"),
        ("https://github.com", "octo", "41"),
        ("https://github.com", "octo/../admin", "41"),
        ("https://github.com", 'octo/"><img>', "41"),
        ("https://github.com", "octo/app", "nightly"),
        ("https://github.com", "octo/app", "41/../../settings"),
        ("https://github.com", "octo/app", "set.large"),
    ],
)
def test_run_without_a_safe_address_has_no_page(server: str, repository: str, run_id: str) -> None:
    assert pool_config(github_url=server).run_url(repository, run_id) == ""
