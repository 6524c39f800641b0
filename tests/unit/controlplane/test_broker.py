"""The broker on a simulated pool: requests of workflows, refusals, limits, progress and answers."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from remuda.adapters.aws import clients as aws_clients
from remuda.adapters.aws.functions import BROKER_CHECK
from remuda.aws_lambda import broker
from remuda.aws_lambda.broker import CANCEL_WAIT_S, SETTINGS_LIFETIME_S, WORKFLOW_INPUTS, BrokerFunction
from remuda.config.settings import Settings
from remuda.controlplane.context import Context
from remuda.domain.errors import Unavailable
from remuda.domain.instance import State
from remuda.domain.provision import ProvisionStatus
from remuda.domain.resources import DEFAULT_CLASSES, ResourceClass, Reuse, Tier, TypePatterns
from simulation.invariants import POOL, SCOPE
from tests.support.action_steps import parse_command, parse_file
from tests.support.emf import check_emf
from tests.support.leak_scanner import LeakScanner
from tests.support.oidc import TokenIssuer
from tests.support.virtual_time import failing
from tests.support.world import PoolWorld

ENVIRONMENT = {
    "REMUDA_BACKEND": "aws",
    "REMUDA_POOL": POOL,
    "REMUDA_GITHUB_SCOPE": SCOPE,
    "REMUDA_REPOSITORIES": "octo/repo,acme@12/*",
}


class Invocation:
    aws_request_id = "r-1"
    remaining_s = 900.0

    def get_remaining_time_in_millis(self) -> int:
        return int(self.remaining_s * 1_000)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """An answer, as the step uses it."""

    exit: int
    #: None if there is no provision.
    done: bool | None
    log: str
    outputs: dict[str, str]
    summary: str

    @classmethod
    def parse(cls, document: dict[str, str]) -> Answer:
        assert set(document) == {"exit", "done", "log", "outputs", "summary"}
        texts = {name: base64.b64decode(document[name]).decode() for name in ("log", "outputs", "summary")}
        for name in ("exit", "done"):
            assert document[name].isalnum()
        return cls(
            exit=int(document["exit"]),
            done={"true": True, "false": False, "none": None}[document["done"]],
            log=texts["log"],
            outputs=parse_file(texts["outputs"]),
            summary=texts["summary"],
        )

    def annotations(self, level: str) -> list[str]:
        found = [command for line in self.log.splitlines() if (command := parse_command(line))]
        return [command.data for command in found if command.name == level]


class Broker:
    """A warm process of the broker, and workflows that call it."""

    def __init__(self, world: PoolWorld, monkeypatch: pytest.MonkeyPatch) -> None:
        self.world = world
        self.issuer = TokenIssuer()
        self.environ = dict(ENVIRONMENT)
        self.function = BrokerFunction(self.environ, clock=world.clock, fetch=self.issuer.fetch)
        self.invocation = Invocation()
        #: The settings of each opened context, and whether it had a GitHub credential.
        self.opened: list[tuple[Settings, bool]] = []
        self.hook: Any = None
        monkeypatch.setattr(broker, "open_context", self._open_context)

    @asynccontextmanager
    async def _open_context(
        self, settings: Settings, _event_log: Any, *, needs_github: bool, **_: Any
    ) -> AsyncIterator[Context]:
        self.opened.append((settings, needs_github))
        context = self.world.process(self.hook, credentialed=needs_github)
        yield context

    def event(self, operation: str, *, run_id: str = "123", attempt: str = "1", **more: Any) -> dict[str, Any]:
        claims = {"run_id": run_id, "run_attempt": attempt, **more.pop("claims", {})}
        inputs = more.pop("inputs", {})
        if isinstance(inputs, dict):
            inputs = {name.replace("_", "-"): value for name, value in inputs.items()}
        document = {
            "operation": operation,
            "token": self.issuer.token(self.world.clock.now(), **claims),
            "run-id": run_id,
            "run-attempt": attempt,
            "inputs": inputs,
        }
        return {**document, **more}

    async def send(self, event: Any) -> Answer:
        return Answer.parse(await self.function.respond(event, self.invocation))

    async def call(self, operation: str, **more: Any) -> Answer:
        return await self.send(self.event(operation, **more))

    async def refused(self, operation: str = "provision", **more: Any) -> str:
        """The only sentence of a refusal, in the log and in the summary."""
        answer = await self.call(operation, **more)
        assert (answer.exit, answer.done, answer.outputs) == (2, True, {})
        assert not self.world.in_state(State.CLAIMED, State.RUNNING, State.CREATED)
        (error,) = answer.annotations("error")
        assert "failed" in answer.summary
        return error


@pytest.fixture
def subject(world: PoolWorld, monkeypatch: pytest.MonkeyPatch) -> Broker:
    return Broker(world, monkeypatch)


async def test_the_check_of_the_role_is_for_direct_invocations_only(subject: Broker) -> None:
    """Anybody can send a request to the URL of the function."""
    unequal: tuple[dict[str, Any], ...] = ({"token": "x.y.z"}, {"inputs": {}}, {"run-id": "1"})
    for more in unequal:
        answer = await subject.send({**BROKER_CHECK, **more})
        assert (answer.exit, subject.opened) == (2, [])
    request = {"requestContext": {"http": {"method": "POST"}}, "body": json.dumps(BROKER_CHECK)}
    for event in (request, {**request, **BROKER_CHECK}):
        document = await subject.function.respond(event, subject.invocation)
        assert document["statusCode"] == 400
        assert subject.opened == []


# Provision and release ------------------------------------------------------------------------------------------------


async def test_a_run_gets_its_runners_and_gives_them_back(subject: Broker) -> None:
    answer = await subject.call("provision", inputs={"instance_count": "2"})
    assert (answer.exit, answer.done) == (0, True)
    running = subject.world.in_state(State.RUNNING)
    assert (
        answer.outputs
        == {
            "label": "123",
            "instance-ids": json.dumps(running),
            "reused": "0",
            "created": "2",
        }
        or sorted(json.loads(answer.outputs["instance-ids"])) == running
    )
    assert answer.summary.startswith("### remuda provision: 2 runners for run 123\n")
    assert "Tier trusted: event push" in answer.summary
    first, *_, last = answer.log.splitlines()
    assert first == "::group::remuda provision"
    assert last.startswith("run 123 has 2 runners: 0 reused, 2 created, in ")
    assert {runner.labels for runner in subject.world.registrations()} == {("123", "123/large")}

    released = await subject.call("release")
    assert (released.exit, released.outputs) == (0, {})
    assert released.summary.startswith("### remuda release: run 123\n")
    assert subject.world.in_state(State.IDLE) == running

    again = await subject.call("provision", run_id="124")
    assert (again.outputs["reused"], again.outputs["created"]) == ("1", "0")


async def test_the_repository_of_the_claims_is_recorded(subject: Broker) -> None:
    subject.environ["REMUDA_GITHUB_SCOPE"] = "octo"
    subject.environ["REMUDA_REPOSITORIES"] = "octo/*"
    await subject.world.configure(scope="octo", reuse=Reuse.SAME_REPO)
    answer = await subject.call("provision", claims={"repository": "octo/Tool"})
    assert answer.exit == 0
    (instance_id,) = json.loads(answer.outputs["instance-ids"])
    assignment = subject.world.record(instance_id).assignment
    assert assignment is not None
    assert assignment.repository == "octo/Tool"


async def test_a_label_may_have_a_suffix(subject: Broker) -> None:
    answer = await subject.call("provision", inputs={"run_id": "123-large"})
    assert answer.outputs["label"] == "123-large"
    assert (await subject.call("state", inputs={"run_id": "123-large"})).outputs["label"] == "123-large"
    assert not (await subject.call("state")).done
    assert (await subject.call("release", inputs={"run_id": "123-large"})).exit == 0
    for label in ("124", "1234", "12", "x-123"):
        sentence = f"run-id is '{label}', but the token is of run 123; omit it, or give github.run_id with a suffix: "
        assert (await subject.refused(inputs={"run_id": label})).startswith(sentence)


async def test_a_release_warns_about_inputs_without_effect(subject: Broker) -> None:
    await subject.call("provision")
    answer = await subject.call("release", inputs={"instance_count": "2"})
    assert answer.annotations("warning") == ["mode release does not use instance-count: remove it"]


async def test_a_release_can_affect_only_the_run_of_the_token(subject: Broker) -> None:
    await subject.call("provision", run_id="123")
    assert (await subject.call("release", run_id="124")).exit == 0
    assert len(subject.world.in_state(State.RUNNING)) == 1


async def test_connections_are_kept_between_requests(subject: Broker) -> None:
    for run_id in ("1", "2", "3"):
        await subject.call("provision", run_id=run_id)
        await subject.call("release", run_id=run_id)
    assert len(subject.opened) == 1
    assert len(subject.issuer.fetched) == 1


async def test_changed_settings_apply_after_a_while(subject: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    async def read_parameter(_clients: Any, name: str) -> str:
        read.append(name)
        return "REMUDA_REPOSITORIES=" + {1: "octo/repo", 2: "octo/other"}.get(len(read), "octo/*")

    monkeypatch.setattr(aws_clients, "read_parameter", read_parameter)
    monkeypatch.setenv("AWS_REGION", "eu-central-1")
    subject.environ["REMUDA_SETTINGS_PARAMETER"] = "/remuda/test/settings"
    subject.environ["REMUDA_REPOSITORIES"] = ""
    assert (await subject.call("provision")).exit == 0
    assert (await subject.call("release")).exit == 0
    assert read == ["/remuda/test/settings"]
    await asyncio.sleep(SETTINGS_LIFETIME_S)
    assert "may not use pool test" in await subject.refused()
    assert len(read) == 2
    await asyncio.sleep(SETTINGS_LIFETIME_S)
    assert (await subject.call("provision")).exit == 0
    # With the new settings.
    assert [[str(each) for each in settings.repositories] for settings, _ in subject.opened] == [
        ["octo/repo"],
        ["octo/*"],
    ]


# Refusals -------------------------------------------------------------------------------------------------------------


#: Claims, and how the refusal of their token begins.
REFUSED_CLAIMS: list[tuple[dict[str, Any], str]] = [
    ({"aud": "sts.amazonaws.com"}, "the OIDC token is for 'sts.amazonaws.com', not for remuda-test; request it "),
    ({"iss": "https://evil.example"}, "the OIDC token was issued by 'https://evil.example', not by https://token."),
    ({"exp": 1_000_000_000}, "the OIDC token expired "),
    ({"nbf": 4_000_000_000}, "the OIDC token is not valid yet: it begins in "),
    ({"run_id": "99"}, "the token is of run 99, this step is of run '123'; request the token in the step that "),
    ({"run_attempt": "2"}, "the token is of attempt 2 of run 123, this step is of attempt '1'; request the token "),
    (
        {"repository": "eve/repo", "repository_owner": "eve"},
        "repository eve/repo (id 74, owner id 65) may not use pool test; add it to Repositories of the pool's ",
    ),
    ({"repository": "octo/other"}, "repository octo/other (id 74, owner id 65) may not use pool test; "),
    (
        {"repository": "acme/app", "repository_owner": "acme", "repository_owner_id": "13"},
        "repository acme/app (id 74, owner id 13) may not use pool test; ",
    ),
    (
        {"repository": "acme/app", "repository_owner": "acme", "repository_owner_id": "12"},
        "the runners of pool test register in octo/repo and cannot serve acme/app; ",
    ),
    ({"repository": "eve/repo"}, "the claim repository of the OIDC token is 'eve/repo'; "),
    ({"run_attempt": "x"}, "the claim run_attempt of the OIDC token is 'x'; "),
    ({"event_name": None}, "the OIDC token has no claim event_name; "),
]


async def test_refused_tokens(subject: Broker) -> None:
    for claims, sentence in REFUSED_CLAIMS:
        for operation in ("provision", "release", "state", "cancel"):
            assert (await subject.refused(operation, claims=claims)).startswith(sentence)
    assert not subject.opened


async def test_only_listed_environments_may_use_the_pool(subject: Broker) -> None:
    subject.environ["REMUDA_ENVIRONMENTS"] = "ci,release build"
    assert (await subject.call("provision", claims={"environment": "release build"})).exit == 0
    await subject.call("release", claims={"environment": "ci"})
    for claims, has in (
        ({"environment": "staging"}, "has the environment 'staging'"),
        ({"environment": "CI"}, "has the environment 'CI'"),
        ({}, "has no environment"),
    ):
        sentence = f"pool test is for jobs of the environments ci, release build; this job {has}; set environment in "
        assert (await subject.refused(claims=claims)).startswith(sentence)


async def test_without_repositories_nobody_may_use_the_pool(subject: Broker) -> None:
    subject.environ["REMUDA_REPOSITORIES"] = ""
    assert "may not use pool test" in await subject.refused()


async def test_other_unusable_tokens(subject: Broker) -> None:
    good = subject.event("provision")["token"]
    head, body, tail = good.split(".")
    claims = json.loads(base64.urlsafe_b64decode(body + "=="))
    forged = base64.urlsafe_b64encode(json.dumps({**claims, "run_id": "123", "actor": "eve"}).encode()).decode()
    none = base64.urlsafe_b64encode(b'{"alg": "none", "kid": "x"}').decode().rstrip("=")
    for token, sentence in (
        ("", "the request has no OIDC token; give the job 'permissions: id-token: write'; pull requests from forks "),
        ("x", "the OIDC token is not a JWT; "),
        (f"{head}.{forged.rstrip('=')}.{tail}", "the signature of the OIDC token is not valid; "),
        (f"{none}.{body}.{tail}", "the OIDC token has the algorithm 'none'; only RS256 is accepted; "),
    ):
        assert (await subject.refused(token=token)).startswith(sentence)
    unknown = subject.issuer.token(subject.world.clock.now(), headers={"kid": "unknown"})
    assert (await subject.refused(token=unknown)).startswith("the OIDC token is signed with a key that https://token.")


async def test_without_the_issuers_keys_the_step_may_try_again(subject: Broker) -> None:
    subject.issuer.failure = OSError("timed out")
    answer = await subject.call("provision")
    assert answer.exit == 4
    (error,) = answer.annotations("error")
    assert error.startswith("the signing keys of OIDC tokens cannot be read from https://token.actions.githubuser")
    assert "; try again" in error
    subject.issuer.failure = None
    assert (await subject.call("provision")).exit == 0


#: Changes of a request, and how its refusal begins.
REFUSED_REQUESTS: list[tuple[dict[str, Any], str]] = [
    ({"operation": "destroy"}, "operation is 'destroy'; use provision, release, state, cancel"),
    ({"operation": 7}, "operation is a int; send a text"),
    ({"token": None}, "token is a NoneType; send a text"),
    ({"run-id": 123}, "run-id is a int; send a text"),
    ({"inputs": ["x"]}, "inputs is a list; send an object of texts"),
    ({"inputs": {"instance-count": 2}}, "instance-count is a int; send a text"),
    (
        {"inputs": {"max-instances": "9"}},
        "max-instances is set by the pool, not by a workflow; remove it from the ",
    ),
    ({"inputs": {"github-token": "x"}}, "github-token is set by the pool, not by a workflow; "),
    ({"inputs": {"ami": "ami-1"}}, "ami is set by the pool, not by a workflow; "),
    ({"inputs": {"github-scope": "eve"}}, "github-scope is set by the pool, not by a workflow; "),
    ({"inputs": {"repository": "eve/x"}}, "repository comes from the workflow's OIDC token; remove it from the "),
    ({"inputs": {"run-attempt": "2"}}, "run-attempt comes from the workflow's OIDC token; remove it from the "),
    ({"inputs": {"instance-counts": "9"}}, "there is no input 'instance-counts'; did you mean instance-count?"),
    ({"inputs": {"zzz": "9"}}, "there is no input 'zzz'; use add, allowed-instance-types, ephemeral, "),
    ({"inputs": {"instance-count": "many"}}, "instance-count must be an integer from 1 to 1000, got 'many'"),
    ({"inputs": {"usage-class": "free"}}, "usage-class must be on-demand or spot, got 'free'"),
    ({"inputs": {"eyJhbGciOiJSUzI1NiJ9": "x"}}, "an input has an invalid name; use add, allowed-instance-types, "),
]


async def test_refused_requests(subject: Broker) -> None:
    for changed, sentence in REFUSED_REQUESTS:
        assert (await subject.refused(**changed)).startswith(sentence)


async def test_other_events_are_refused(subject: Broker) -> None:
    events: list[Any] = [None, [], "x", {}, {"operation": "provision"}, {"requestContext": {"http": {}}}]
    for event in events:
        document = await subject.function.respond(event, subject.invocation)
        answer = Answer.parse(json.loads(document["body"]) if "body" in document else document)
        assert answer.exit == 2
        assert len(answer.annotations("error")) == 1


async def test_empty_inputs_are_not_set(subject: Broker) -> None:
    """A composite action passes all of them."""
    answer = await subject.call("provision", inputs={**dict.fromkeys(WORKFLOW_INPUTS, ""), "max-instances": ""})
    assert answer.exit == 0


# Limits of the pool ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inputs", "code", "sentence"),
    [
        (
            {"resource_class": "huge"},
            2,
            "resource-class 'huge' is not a class of this pool; use one of large, xlarge, ",
        ),
        (
            {"allowed_instance_types": "p5.48xlarge", "resource_class": "small"},
            2,
            "allowed-instance-types 'p5.48xlarge' has no type in common with the types of class 'small': 'c6i.* m6i.*'",
        ),
        (
            {"instance_count": "7"},
            3,
            "instance-count is 7; the pool's max-instances is 6; request fewer instances, or ",
        ),
        (
            {"tier": "trusted"},
            2,
            "tier is trusted, but the event is untrusted: event pull_request: its token does not ",
        ),
    ],
)
async def test_the_pool_limits_what_a_workflow_gets(
    subject: Broker, inputs: dict[str, str], code: int, sentence: str
) -> None:
    small = ResourceClass(name="small", cpu=1, memory_mib=512, types=TypePatterns(("c6i.*", "m6i.*")))
    await subject.world.configure(max_instances=6, classes=(*DEFAULT_CLASSES, small))
    claims = {"event_name": "pull_request"}
    answer = await subject.call("provision", inputs=inputs, claims=claims)
    assert answer.exit == code
    (error,) = answer.annotations("error")
    assert error.startswith(sentence)
    assert not subject.world.alive()


async def test_live_instances_of_all_runs_count(subject: Broker) -> None:
    await subject.world.configure(max_instances=3)
    assert (await subject.call("provision", run_id="1", inputs={"instance_count": "2"})).exit == 0
    answer = await subject.call("provision", run_id="2", inputs={"instance_count": "2"})
    assert answer.exit == 3
    assert "max-instances is 3" in answer.annotations("error")[0]


async def test_the_pools_runtime_is_the_limit_of_a_run(subject: Broker) -> None:
    answer = await subject.call("provision", inputs={"max_runtime_min": "600"})
    (instance_id,) = json.loads(answer.outputs["instance-ids"])
    record = subject.world.record(instance_id)
    limit_s = subject.world.lifetimes.max_runtime_s
    assert (record.threshold - subject.world.clock.now()).total_seconds() <= limit_s + subject.world.lifetimes.margin_s
    assert "max-runtime-min is 2, the limit of the pool" in answer.log
    shorter = await subject.call("provision", run_id="124", inputs={"max_runtime_min": "1"})
    (instance_id,) = json.loads(shorter.outputs["instance-ids"])
    assert (subject.world.record(instance_id).threshold - subject.world.clock.now()).total_seconds() < limit_s
    assert "limit of the pool" not in shorter.log


async def test_a_provision_ends_before_the_functions_time(subject: Broker) -> None:
    subject.world.behaviour.boot_s = 100.0
    subject.invocation.remaining_s = 60.0
    started = subject.world.loop.time()
    answer = await subject.call("provision", inputs={"provision_timeout_sec": "300"})
    assert answer.exit == 4
    assert subject.world.loop.time() - started <= 30.0
    assert "not registered: time is up" in answer.annotations("error")[0]
    assert "the provision has 25 s, the most that is possible here" in answer.log
    subject.world.check_holds_nothing("123")


async def test_trust_comes_from_the_event_of_the_claims(subject: Broker) -> None:
    async def tier_of(run_id: str, event: str, **inputs: str) -> Tier:
        answer = await subject.call("provision", run_id=run_id, claims={"event_name": event}, inputs=inputs)
        (instance_id,) = json.loads(answer.outputs["instance-ids"])
        assignment = subject.world.record(instance_id).assignment
        assert assignment is not None
        return assignment.tier

    assert await tier_of("1", "push") is Tier.TRUSTED
    assert await tier_of("2", "push", tier="untrusted") is Tier.UNTRUSTED
    for number, event in enumerate(
        ("pull_request", "pull_request_target", "workflow_run", "issue_comment", "new_event")
    ):
        assert await tier_of(f"3{number}", event) is Tier.UNTRUSTED
    subject.environ["REMUDA_TRUST_PULL_REQUESTS"] = "true"
    await asyncio.sleep(SETTINGS_LIFETIME_S)
    assert await tier_of("4", "pull_request") is Tier.TRUSTED
    assert await tier_of("5", "pull_request_target") is Tier.UNTRUSTED


# Credentials ----------------------------------------------------------------------------------------------------------


async def test_long_name_of_a_class_is_cut(subject: Broker) -> None:
    assert len(await subject.refused(inputs={"resource_class": "x" * 1_000_000})) < 300


async def test_ephemeral_runners_use_the_credential_of_the_function(subject: Broker) -> None:
    answer = await subject.call("provision", inputs={"ephemeral": "true"})
    assert answer.exit == 0
    assert [needs for _, needs in subject.opened] == [True]
    assert "Ephemeral: each instance runs one job" in answer.summary
    # A step asks for the state every few seconds, which needs no credential.
    assert (await subject.call("state", inputs={"ephemeral": "true"})).done
    assert [needs for _, needs in subject.opened] == [True, False]
    assert (await subject.call("release")).exit == 0


async def test_no_credential_is_in_an_answer_or_in_the_log(
    subject: Broker, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    scanner = LeakScanner()
    event = subject.event("provision", inputs={"ephemeral": "true"})
    scanner.add("OIDC token", event["token"])

    async def broken(*_: Any, **__: Any) -> Any:
        raise Unavailable(f"no answer for {event['token']}")

    documents = [await subject.function.respond(event, subject.invocation)]
    monkeypatch.setattr(broker, "release", broken)
    documents.append(await subject.function.respond({**event, "operation": "release"}, subject.invocation))
    documents.append(await subject.function.respond({**event, "inputs": {event["token"]: "x"}}, subject.invocation))
    seen = capsys.readouterr().out
    for document in documents:
        for name in ("log", "outputs", "summary"):
            seen += base64.b64decode(document[name]).decode()
        seen += json.dumps(document)
    assert not scanner.find(seen, "answers and log")
    issued = [*subject.world.github._tokens, subject.world.token]
    assert len(issued) > 2
    assert not [token for token in issued if token in seen]
    assert "::add-mask::" not in seen


# Progress -------------------------------------------------------------------------------------------------------------


async def test_state_shows_progress_and_then_the_result(subject: Broker) -> None:
    await subject.world.warm(1)
    subject.world.behaviour.boot_s = 20.0
    none = await subject.call("state")
    assert (none.exit, none.done) == (0, None)
    assert none.log == "run 123 has no provision of attempt 1 yet\n"
    inputs = {"instance_count": "3", "tier": "trusted"}
    provisioning = asyncio.ensure_future(subject.call("provision", inputs=inputs))
    await asyncio.sleep(8.0)
    other = Broker.__new__(Broker)
    other.__dict__ = {**subject.__dict__}
    other.function = BrokerFunction(subject.environ, clock=subject.world.clock, fetch=subject.issuer.fetch)
    state = await other.call("state", inputs=inputs)
    assert (state.exit, state.done, state.outputs, state.summary) == (0, False, {}, "")
    booting = subject.world.in_state(State.CREATED)
    assert len(booting) == 2
    names = ", ".join(f"{each} (booting)" for each in booting)
    assert state.log == f"1 of 3 runners registered after 8 s; waiting for {names}\n"
    answer = await provisioning
    done = await other.call("state", inputs=inputs)
    assert done.done
    assert done.exit == answer.exit == 0
    assert done.outputs == answer.outputs
    assert done.outputs["reused"] == "1"

    def page(text: str) -> list[str]:
        # The calls of the provision are not recorded, and the total includes the time after the last phase.
        return [line for line in text.splitlines() if not line.startswith("API calls:")]

    assert page(done.summary)[0] == page(answer.summary)[0]
    assert [line for line in page(done.summary) if line.startswith("| i-")] == [
        line for line in page(answer.summary) if line.startswith("| i-")
    ]
    await subject.call("release")
    released = await other.call("state")
    assert (released.done, released.exit, released.outputs) == (True, 4, {})
    assert released.annotations("error")[0].startswith("run 123: by attempt 1; 'remuda explain 123' shows what ")


async def test_state_of_a_failed_provision_has_its_error(subject: Broker) -> None:
    subject.world.cloud.capacity = dict.fromkeys([kind.name for kind in subject.world.cloud.types], 0)
    answer = await subject.call("provision")
    state = await subject.call("state")
    assert (state.done, state.exit, answer.exit) == (True, 3, 3)
    shown = answer.annotations("error")[0].partition("; ")[0][:100]
    assert shown in state.annotations("error")[0]


async def test_state_is_that_of_the_resource_class(subject: Broker) -> None:
    """A run with two classes has two steps, each with its own provision."""
    large = await subject.call("provision", inputs={"instance_count": "2"})
    xlarge = await subject.call("provision", inputs={"resource_class": "xlarge"})
    assert (await subject.call("state", inputs={"instance_count": "2"})).outputs == large.outputs
    assert (await subject.call("state", inputs={"resource_class": "xlarge"})).outputs == xlarge.outputs
    assert large.outputs != xlarge.outputs
    assert (await subject.call("state", inputs={"resource_class": "2xlarge"})).done is None


async def test_state_of_another_attempt_is_not_shown(subject: Broker) -> None:
    await subject.call("provision")
    state = await subject.call("state", attempt="2")
    assert state.done is None
    assert state.log == "run 123 has no provision of attempt 2 yet\n"


async def test_an_abandoned_provision_is_done_after_its_deadline(subject: Broker) -> None:
    subject.world.behaviour.boot_s = 1_000.0
    provisioning = asyncio.ensure_future(subject.call("provision", inputs={"provision_timeout_sec": "30"}))
    await asyncio.sleep(5.0)
    (record,) = subject.world.database.provisions.values()
    assert record.status is ProvisionStatus.OPEN
    provisioning.cancel()
    with pytest.raises(asyncio.CancelledError):
        await provisioning
    # As if the process had been killed: the record stays open.
    (key,) = subject.world.database.provisions
    dict.__setitem__(subject.world.database.provisions, key, record)
    await asyncio.sleep(30.0)
    state = await subject.call("state")
    assert (state.done, state.exit) == (True, 4)
    assert state.annotations("error")[0].startswith("run 123 was not provisioned in time; ")


async def test_a_cancelled_step_stops_its_provision(subject: Broker) -> None:
    subject.world.behaviour.boot_s = 20.0
    provisioning = asyncio.ensure_future(subject.call("provision", inputs={"instance_count": "2"}))
    await asyncio.sleep(5.0)
    cancelled = await subject.call("cancel")
    assert (cancelled.exit, cancelled.done) == (130, True)
    assert cancelled.annotations("notice") == [
        "cancelled; the provision was stopped, and its instances were given back"
    ]
    assert cancelled.summary.startswith("### remuda provision: cancelled\n")
    answer = await provisioning
    assert answer.exit == 4
    assert "was released while it was being provisioned" in answer.annotations("error")[0]
    subject.world.check_holds_nothing("123")


async def test_a_step_cancelled_before_its_provision_starts_stops_it(subject: Broker) -> None:
    """The function of the provision may still be starting while a warm one receives the cancellation."""
    assert (await subject.call("provision")).exit == 0
    assert (await subject.call("release")).exit == 0
    subject.world.behaviour.boot_s = 20.0
    cancelling = asyncio.ensure_future(subject.call("cancel"))
    await asyncio.sleep(1.0)
    answer = await subject.call("provision", inputs={"instance_count": "2"})
    assert answer.exit == 4
    assert (await cancelling).annotations("notice") == [
        "cancelled; the provision was stopped, and its instances were given back"
    ]
    subject.world.check_holds_nothing("123")


async def test_cancellation_without_a_provision_says_so(subject: Broker) -> None:
    cancelled = await subject.call("cancel")
    assert cancelled.exit == 130
    assert cancelled.annotations("notice") == [
        "cancelled; no provision has started yet; release gives back the instances of one that starts later"
    ]


async def test_a_cancelled_step_does_not_wait_for_machines(subject: Broker) -> None:
    await subject.call("provision")
    subject.world.behaviour.reset_s = 20.0
    started = subject.world.loop.time()
    cancelled = await subject.call("cancel")
    assert subject.world.loop.time() - started == pytest.approx(CANCEL_WAIT_S)
    assert cancelled.exit == 130
    assert cancelled.annotations("notice") == [
        "cancelled; the provision was stopped, and its instances are being given back"
    ]
    await subject.world.pass_time(60.0)
    assert len(subject.world.in_state(State.IDLE)) == 1


# Function URL ---------------------------------------------------------------------------------------------------------


def http(document: Any, *, encoded: bool = False, method: str = "POST") -> dict[str, Any]:
    """A request to the URL of a function, in the payload format 2.0 of AWS' documentation."""
    body = document if isinstance(document, str) else json.dumps(document)
    return {
        "version": "2.0",
        "routeKey": "$default",
        "rawPath": "/",
        "rawQueryString": "",
        "headers": {"content-type": "application/json"},
        "requestContext": {
            "accountId": "anonymous",
            "apiId": "abc",
            "domainName": "abc.lambda-url.eu-central-1.on.aws",
            "http": {"method": method, "path": "/", "protocol": "HTTP/1.1", "sourceIp": "192.0.2.1"},
            "requestId": "id",
            "stage": "$default",
        },
        "body": base64.b64encode(body.encode()).decode() if encoded else body,
        "isBase64Encoded": encoded,
    }


@pytest.mark.parametrize("encoded", [False, True])
async def test_requests_to_the_url_get_the_same_answers(subject: Broker, encoded: bool) -> None:  # noqa: FBT001
    response = await subject.function.respond(http(subject.event("provision"), encoded=encoded), subject.invocation)
    assert (response["statusCode"], response["headers"]["content-type"]) == (200, "application/json")
    assert Answer.parse(json.loads(response["body"])).outputs["label"] == "123"


async def test_status_of_answers_to_the_url(subject: Broker) -> None:
    async def status(event: Any) -> int:
        response = await subject.function.respond(event, subject.invocation)
        assert Answer.parse(json.loads(response["body"])).log
        return int(response["statusCode"])

    assert await status(http("{", encoded=True)) == 400
    assert await status(http("x" * 70_000)) == 400
    assert await status(http({}, method="GET")) == 400
    assert await status({**http({}), "body": None}) == 400
    assert await status(http(subject.event("provision", inputs={"ami": "x"}))) == 400
    assert await status(http(subject.event("provision", claims={"aud": "x"}))) == 401
    assert await status(http(subject.event("provision", claims={"repository": "octo/x"}))) == 403
    # The work was done, or tried: its result is the content of the answer.
    assert await status(http(subject.event("provision", inputs={"instance_count": "999"}))) == 200
    subject.issuer.failure = OSError("timed out")
    subject.function = BrokerFunction(subject.environ, clock=subject.world.clock, fetch=subject.issuer.fetch)
    assert await status(http(subject.event("provision"))) == 503


# Log and metrics ------------------------------------------------------------------------------------------------------


@dataclass
class Lines:
    events: list[dict[str, Any]] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)


def lines_of(capsys: pytest.CaptureFixture[str]) -> Lines:
    *events, last = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    check_emf(last)
    return Lines(events=events, metrics=last)


async def test_each_request_is_logged_and_measured(subject: Broker, capsys: pytest.CaptureFixture[str]) -> None:
    await subject.call("provision", inputs={"instance_count": "2"})
    lines = lines_of(capsys)
    first, last = lines.events[0], lines.events[-1]
    assert (first["event"], first["reason"], first["run_id"]) == ("request", "provision", "123")
    assert (first["repository"], first["github_event"], first["request"]) == ("octo/repo", "push", "r-1")
    assert (last["event"], last["exit"]) == ("provision-done", 0)
    numbers = {name: lines.metrics[name] for name in ("Errors", "Failed", "RunnersReused", "RunnersCreated")}
    assert numbers == {"Errors": 0, "Failed": 0, "RunnersReused": 0, "RunnersCreated": 2}
    assert (lines.metrics["Pool"], lines.metrics["Command"]) == ("test", "provision")


@pytest.mark.parametrize(
    ("more", "counts"),
    [
        ({"claims": {"aud": "x"}}, {"Refused": 1, "RefusedToken": 1, "Failed": 0}),
        ({"claims": {"repository": "octo/x"}}, {"Refused": 1, "RefusedPermission": 1, "Failed": 0}),
        ({"inputs": {"ami": "x"}}, {"Refused": 1, "RefusedInput": 1, "Failed": 0}),
        ({"inputs": {"instance_count": "999"}}, {"NoCapacity": 1, "Failed": 0}),
    ],
)
async def test_refusals_are_measured(
    subject: Broker, capsys: pytest.CaptureFixture[str], more: dict[str, Any], counts: dict[str, int]
) -> None:
    await subject.call("provision", **more)
    lines = lines_of(capsys)
    assert {name: lines.metrics[name] for name in counts} == counts
    assert lines.events[-1]["event"] in {"refused", "failed"}


async def test_failures_are_measured_and_the_next_request_starts_afresh(
    subject: Broker, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: Any, **__: Any) -> Any:
        raise KeyError("oh")

    with monkeypatch.context() as patched:
        patched.setattr(broker, "provision", broken)
        answer = await subject.call("provision")
    assert answer.exit == 70
    assert answer.annotations("error")[0].startswith("a bug: KeyError: 'oh' (test_broker.py:")
    lines = lines_of(capsys)
    assert (lines.metrics["Failed"], lines.metrics["Errors"]) == (1, 1)
    assert (await subject.call("provision")).exit == 0
    assert len(subject.opened) == 2


async def test_an_unreachable_store_is_a_failure(subject: Broker, capsys: pytest.CaptureFixture[str]) -> None:
    subject.hook = failing("store.get_config", Unavailable("DynamoDB does not answer"))
    answer = await subject.call("provision")
    assert answer.exit == 4
    assert lines_of(capsys).metrics["Failed"] == 1
