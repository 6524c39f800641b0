"""The commands with the AWS backend against test servers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.aws.stack import POOL, SCOPE, SHORT_TIMES, AwsStack, aws_stack
from tests.support.cli import run_installed


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AwsStack]:
    with aws_stack(tmp_path_factory.mktemp("aws")) as started:
        yield started


def test_provision_whose_machines_never_boot_leaves_nothing(stack: AwsStack):
    code, first = stack.refresh(**SHORT_TIMES)
    assert code == 0, first
    assert any("table" in line for line in first["applied"])
    assert sum("queue" in line for line in first["applied"]) == 7
    assert f"tokens for {SCOPE}" in first["applied"]
    code, again = stack.refresh(**SHORT_TIMES)
    assert (code, again["applied"]) == (0, [])

    assert stack.remuda("status")[1]["instances"] == []
    code, failed = stack.remuda(
        *("provision", "--run-id", "7", "--instance-count", "2", "--github-scope", SCOPE, "--resource-class", "large"),
        # Long enough to launch the instances.
        *("--provision-timeout-sec", "12"),
    )
    assert (code, failed["error"]["type"]) == (4, "TimedOut"), failed
    states = [item["state"] for item in stack.remuda("status")[1]["instances"]]
    assert states == ["terminating"] * 2
    code, swept = stack.refresh("--sweep-only", **SHORT_TIMES)
    assert (code, len(swept["terminated"])) == (0, 2), swept
    assert stack.remuda("status")[1]["instances"] == []
    assert {item["state"] for item in stack.remuda("status", "--all")[1]["instances"]} == {"terminated"}
    assert stack.remuda("release", "--run-id", "7")[0] == 0

    code, explanation = stack.remuda("explain", "7")
    events = [line["what"] for line in explanation["events"]]
    assert (code, events.count("terminated"), "launched 2" in events) == (0, 2, True), explanation
    assert any(what.startswith("failed after") for what in events)
    code, report = stack.remuda("report", "--since", "1h")
    assert (code, report["provisions"]["kinds"]) == (0, {"failed": 1}), report
    assert report["instance_hours"]["booting"] > 0


def test_provision_without_capacity_fails_and_leaves_nothing(stack: AwsStack):
    stack.refresh(**SHORT_TIMES)
    code, answer = stack.remuda(
        "provision", "--run-id", "8", "--github-scope", SCOPE, "--allowed-instance-types", "zz*"
    )
    assert (code, answer["error"]["type"]) == (3, "CapacityError"), answer
    assert stack.remuda("status")[1]["instances"] == []


def test_unknown_instance_profile_is_rejected_before_anything_is_created(stack: AwsStack):
    flags = [*stack.flags(), "--iam-instance-profile", "nobody"]
    code, answer = stack.remuda("refresh", "--github-scope", SCOPE, *flags, pool="profileless")
    assert (code, answer["error"]["field"]) == (2, "iam-instance-profile"), answer
    assert "'nobody'" in answer["error"]["message"]
    code, answer = stack.remuda("status", pool="profileless")
    assert (code, "no table" in answer["error"]["message"]) == (2, True), answer


def test_installed_command_and_forked_command_give_the_same_answers(stack: AwsStack):
    stack.refresh(**SHORT_TIMES)
    for arguments in (("status",), ("release", "--run-id", "9"), ("explain", "no-such-run")):
        code, answer = stack.remuda(*arguments)
        installed = run_installed([*arguments, "--pool", POOL, "--json"], environment=stack.environment())
        assert (installed.code, installed.document.keys()) == (code, answer.keys()), installed.stderr
