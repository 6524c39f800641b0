"""`remuda deploy` and `remuda destroy` in an empty account on the test servers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.aws.deployment import EmptyAccount, empty_account
from tests.support.aws.stack import SCOPE, AwsStack


@pytest.fixture(scope="module")
def account(stack: AwsStack) -> Iterator[EmptyAccount]:
    with empty_account(stack) as made:
        yield made


def statuses(checks: list[dict[str, str]]) -> dict[str, str]:
    return {item["name"]: item["status"] for item in checks}


def test_dry_run_lists_everything_and_leaves_nothing(account: EmptyAccount):
    before = account.resources("")
    result = account.deploy("--dry-run", pool="dry")
    assert result.code == 0, result.stderr
    found = {(item["change"], item["resource"]) for item in result.document["changes"]}
    assert {("add", "Table"), ("add", "RefreshFunction"), ("add", "WorkflowRole"), ("add", "QueueLarge")} <= found
    assert not [name for _, name in found if name.endswith("Alarm")]
    assert set(result.document["outside"]) == {"bucket", "secret", "oidc provider", "security group"}
    assert account.resources("") == before


def test_deploy_creates_a_pool_that_doctor_finds_healthy_and_again_changes_nothing(account: EmptyAccount):
    result = account.deploy("--yes", pool="whole")
    assert result.code == 0, result.stderr
    document = result.document
    assert statuses(document["doctor"]).keys() >= {"table", "launch template", "github access"}
    assert {status for name, status in statuses(document["doctor"]).items()} == {"ok"}, document["doctor"]
    assert f"tokens for {SCOPE}" in document["refresh"]["applied"]
    assert f"role-to-assume: {document['outputs']['WorkflowRoleArn']}" in document["workflow"]
    assert {"add"} == {item["change"] for item in document["changes"]}
    # Events of the stack are shown as they happen.
    assert "Table: create complete" in result.stderr
    assert account.stack.github.token not in result.stdout + result.stderr

    again = account.deploy("--yes", pool="whole")
    assert (again.code, again.document["changes"], again.document["done"]) == (0, [], []), again.stderr
    assert again.document["refresh"]["applied"] == []
    dry = account.deploy("--dry-run", pool="whole")
    assert (dry.code, dry.document["changes"], dry.document["outside"]) == (0, [], [])


def test_changed_settings_change_only_what_depends_on_them(account: EmptyAccount):
    result = account.deploy("--yes", "--max-uses", "7", pool="whole")
    assert result.code == 0, result.stderr
    assert {(item["change"], item["resource"]) for item in result.document["changes"]} == {("change", "Settings")}
    assert result.document["refresh"]["changes"] == {"max-uses": [50, 7]}
    # Settings that are not given keep their values.
    again = account.deploy("--yes", pool="whole")
    assert (again.document["changes"], again.document["refresh"]["changes"]) == ([], {})
