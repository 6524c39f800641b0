"""Configuration and tokens in a refresh."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from remuda.cli.rendering.results import applied_lines, refresh_document
from remuda.controlplane.read.status import status
from remuda.controlplane.refresh import refresh
from remuda.controlplane.refresh.configure import DesiredConfig
from remuda.domain.errors import Unavailable, UserError
from remuda.domain.instance import State
from remuda.domain.pool_config import RECORD_VERSION, PoolConfig
from remuda.domain.resources import ResourceClass, Reuse
from remuda.domain.runner_set import RunnerSet
from simulation.invariants import SCOPE
from tests.support.virtual_time import AmbiguousAnswer, Call
from tests.support.world import LIFETIMES, PoolWorld


def config(world: PoolWorld) -> PoolConfig:
    assert world.database.config is not None
    return world.database.config


async def test_first_refresh_creates_all_resources() -> None:
    world = PoolWorld()
    result = await world.configure()
    assert "configuration of pool test" in result.applied
    assert f"tokens for {SCOPE}" in result.applied
    assert sum(line.startswith("queue ") for line in result.applied) == 7
    assert config(world).revision == 1


async def test_second_refresh_changes_nothing(world: PoolWorld) -> None:
    result = await world.configure()
    assert result.applied == ()
    assert config(world).revision == 1
    assert not result.errors


async def test_runner_group_is_stored_with_the_tokens_of_its_scope(world: PoolWorld) -> None:
    world.github.groups["warm"] = 7
    result = await world.configure(runner_group="warm")
    assert result.applied == (f"tokens for {SCOPE}, runner group warm",)
    assert [(each.runner_group, each.runner_group_id) for each in config(world).tokens] == [("warm", 7)]
    assert (await world.configure(runner_group="warm")).applied == ()
    await world.pass_time(3_600)
    assert [(each.runner_group, each.runner_group_id) for each in config(world).tokens] == [("warm", 7)]
    assert (await world.configure()).applied == (f"tokens for {SCOPE}",)
    assert [each.runner_group for each in config(world).tokens] == [""]


async def test_unknown_runner_group_is_rejected(world: PoolWorld) -> None:
    with pytest.raises(UserError, match="has no runner group 'cold'") as caught:
        await world.configure(runner_group="cold")
    assert (caught.value.field, caught.value.fix) == ("runner-group", "set runner-group to one of Default")


@pytest.mark.parametrize("ephemeral", [False, True])
async def test_runners_join_the_group_of_the_pool(world: PoolWorld, ephemeral: bool) -> None:  # noqa: FBT001
    world.github.groups["warm"] = 7
    await world.configure(runner_group="warm")
    process = world.process(credentialed=True)
    (item,) = (await world.provision(ephemeral=ephemeral, process=process)).instances
    if ephemeral:
        assert [runner.group_id for runner in world.github.runners.values()] == [7]
    record = world.record(item.instance.instance_id)
    assert record.assignment is not None
    assert record.assignment.runner_group == "warm"


async def test_changed_settings_are_applied_and_reported(world: PoolWorld) -> None:
    result = await world.configure(lifetimes=replace(LIFETIMES, idle_time_s=33.0), max_instances=7)
    assert sorted(result.applied) == ["idle-time-sec", "max-instances"]
    assert result.changes == {"idle-time-sec": (90.0, 33.0), "max-instances": (100, 7)}
    assert (config(world).revision, config(world).max_instances) == (2, 7)
    assert config(world).lifetimes.idle_time_s == 33.0


async def test_unset_parts_keep_their_stored_values(world: PoolWorld) -> None:
    world.github.groups["warm"] = 7
    classes = (ResourceClass(name="tiny", cpu=1, memory_mib=512),)
    few = RunnerSet(name="few", labels=("few",), resource_class="tiny", scope=SCOPE, max=2)
    before = {
        "classes": classes,
        "lifetimes": replace(LIFETIMES, max_uses=3, idle_time_s=33.0),
        "max_instances": 7,
        "launch": {"boot-delay-s": "2", "fault": "none"},
        "reuse": Reuse.NEVER,
        "runner_sets": (few,),
        "runner_group": "warm",
    }
    await world.configure(**before)
    unset = frozenset({"classes", "max_uses", "max_instances", "boot-delay-s", "reuse", "runner_sets", "runner_group"})
    result = await world.configure(lifetimes=replace(LIFETIMES, idle_time_s=900.0), unset=unset)
    assert set(result.applied) == {"idle-time-sec", "fault"}
    after = config(world)
    assert (after.classes, after.max_instances, after.reuse) == (classes, 7, Reuse.NEVER)
    assert (after.lifetimes.max_uses, after.lifetimes.idle_time_s) == (3, 900.0)
    assert (after.launch, after.runner_sets) == ({"boot-delay-s": "2"}, (few,))
    assert [item.runner_group for item in after.tokens] == ["warm"]


async def test_sets_must_fit_the_stored_classes(world: PoolWorld) -> None:
    stray = RunnerSet(name="few", labels=("few",), resource_class="gpu", scope=SCOPE, max=2)
    with pytest.raises(UserError, match="resource-class of 'few' is 'gpu'"):
        await world.configure(runner_sets=(stray,), unset=frozenset({"classes"}))
    gpu = ResourceClass(name="gpu", cpu=4, memory_mib=512)
    await world.configure(classes=(gpu,))
    await world.configure(runner_sets=(stray,), unset=frozenset({"classes"}))
    assert config(world).runner_sets == (stray,)


async def test_changes_use_setting_names_and_contain_no_secrets(world: PoolWorld) -> None:
    await world.configure(launch={"boot-delay-s": "2", "agent-url": "https://s3/agent?X-Amz-Signature=old"})
    launch = {"pre-runner-script": "TOKEN=hidden", "agent-url": "https://s3/agent?X-Amz-Signature=new"}
    runtime = replace(LIFETIMES, max_runtime_s=600.0)
    classes = (*config(world).classes, ResourceClass(name="tiny", cpu=1, memory_mib=512))
    result = await world.configure(launch=launch, lifetimes=runtime, classes=classes, reuse=Reuse.NEVER)
    assert set(result.changes) == {"boot-delay-sec", "max-runtime-min", "resource-class-config", "reuse"}
    document = refresh_document(result)
    lines = applied_lines(document)
    assert {
        "agent-url",
        "boot-delay-sec: 2 -> not set",
        "pre-runner-script",
        "resource-class-config: none -> tiny (1 vCPU, 512 MiB)",
        "reuse: same-trust -> never",
    } <= set(lines)
    assert f"max-runtime-min: {LIFETIMES.max_runtime_s / 60:g} -> 10" in lines
    assert document["changes"]["reuse"] == ["same-trust", "never"]
    assert "hidden" not in f"{document}{lines}"
    assert "Signature" not in f"{document}{lines}"


async def test_runner_sets_are_stored_and_reported_by_name(world: PoolWorld) -> None:
    large = RunnerSet(name="large", labels=("remuda", "large"), resource_class="large", scope=SCOPE, max=4)
    small = replace(large, name="small", labels=("remuda", "small"))
    result = await world.configure(runner_sets=(large, small))
    assert config(world).runner_sets == (large, small)
    assert result.applied == ("runner-sets",)
    assert (await world.configure(runner_sets=(large, small))).applied == ()
    changed = await world.configure(runner_sets=(replace(large, max=200),))
    before = f"large ({large.describe()}), small ({small.describe()})"
    after = f"large ({replace(large, max=200).describe()})"
    assert applied_lines(refresh_document(changed)) == [f"runner-sets: {before} -> {after}"]
    assert changed.warnings == (
        "runner-sets: max of 'large' is 200, but max-instances is 100: raise max-instances, or jobs above it wait",
    )


async def test_records_of_another_pool_are_never_swept(world: PoolWorld) -> None:
    """Every machine of this pool would look unrecorded."""
    await world.provision()
    other = replace(world.process(credentialed=True), pool_name="other")
    for work in (refresh(other, None), world.provision("2", process=other), world.release("1", process=other)):
        with pytest.raises(UserError, match="belongs to pool"):
            await work
    assert len(world.in_state(State.RUNNING)) == 1


async def test_new_class_gets_a_queue(world: PoolWorld) -> None:
    classes = (ResourceClass(name="tiny", cpu=1, memory_mib=512),)
    result = await world.configure(classes=classes)
    assert "queue tiny" in result.applied
    assert (await world.provision(resource_class="tiny")).created == 1


async def test_second_scope_is_added(world: PoolWorld) -> None:
    await world.configure(scope="octo/other")
    assert {item.scope for item in config(world).tokens} == {SCOPE, "octo/other"}
    assert (await world.provision("2", scope="octo/other")).created == 1
    assert {runner.scope for runner in world.registrations()} == {"octo/other"}


async def test_tokens_are_renewed_before_they_expire(world: PoolWorld) -> None:
    first = config(world).tokens_for(SCOPE)
    await world.pass_time(500)
    assert config(world).tokens_for(SCOPE) == first
    await world.pass_time(300)
    assert config(world).tokens_for(SCOPE).registration.expires_at > first.registration.expires_at


async def test_refresh_without_changes_renews_tokens_of_every_scope(world: PoolWorld) -> None:
    await world.configure(scope="octo/other")
    await world.configure()
    before = config(world).tokens_for("octo/other")
    await asyncio.sleep(700)
    # This refresh renews the tokens of its scope. The next one changes nothing and must renew those of the other.
    await world.configure()
    await world.configure()
    assert config(world).tokens_for("octo/other").registration.expires_at > before.registration.expires_at
    before = config(world).tokens_for("octo/other")
    await world.configure(scope="octo/third")
    await asyncio.sleep(700)
    await world.configure(scope="octo/third")
    await asyncio.sleep(1)
    await world.configure(scope="octo/third")
    assert config(world).tokens_for("octo/other").registration.expires_at > before.registration.expires_at


async def test_failure_to_mint_a_token_does_not_stop_the_refresh(world: PoolWorld) -> None:
    await asyncio.sleep(700)
    hook = AmbiguousAnswer("github.registration_token", applied=False, at=range(1, 100))
    result = await world.sweep(hook)
    assert any("tokens for" in error for error in result.errors)
    assert not (await world.sweep()).errors


async def test_configuration_requires_a_credential() -> None:
    world = PoolWorld()
    with pytest.raises(UserError, match="credential"):
        await refresh(world.process(), world.configuration())


async def test_rejected_credential_stores_nothing() -> None:
    world = PoolWorld()
    world.token = "ghp_wrong"
    with pytest.raises(UserError):
        await world.configure()
    assert world.database.config is None


async def test_records_of_an_older_version_are_refused_and_left_alone(world: PoolWorld) -> None:
    await world.warm(1)
    older = world.database.config = replace(config(world), record_version=RECORD_VERSION - 1)
    before = dict(world.database.instances)
    for refused in (world.configure(max_instances=3), world.sweep(), world.provision("7"), status(world.process())):
        with pytest.raises(UserError, match=f"have version {RECORD_VERSION - 1}, this Remuda has {RECORD_VERSION}$"):
            await refused
    assert (world.database.config, world.database.instances) == (older, before)
    world.database.config = replace(older, record_version=RECORD_VERSION)


async def test_sweeps_without_configuration_do_nothing() -> None:
    world = PoolWorld()
    result = await world.sweep()
    assert not result.errors


async def test_concurrent_refreshes_keep_each_others_changes(world: PoolWorld) -> None:
    hook_calls: list[str] = []

    async def slow(name: str, call: Call) -> Any:
        hook_calls.append(name)
        await asyncio.sleep(0.1)
        return await call()

    one = refresh(world.process(slow, credentialed=True), world.configuration(scope="octo/one"))
    two = refresh(world.process(slow, credentialed=True), world.configuration(scope="octo/two"))
    results = await asyncio.gather(one, two)
    assert not [error for result in results for error in result.errors]
    assert {item.scope for item in config(world).tokens} == {SCOPE, "octo/one", "octo/two"}
    assert config(world).revision == 3


SMALL = ResourceClass(name="small", cpu=1, memory_mib=512)
#: What another process sets, and the names under which a refresh leaves it alone.
SET_MEANWHILE: dict[str, tuple[dict[str, Any], Callable[[PoolConfig | DesiredConfig], Any]]] = {
    "classes": ({"classes": (SMALL,)}, lambda found: found.classes),
    "max_instances": ({"max_instances": 7}, lambda found: found.max_instances),
    "github_url": ({"github_url": "https://github.example"}, lambda found: found.github_url),
    "reuse": ({"reuse": Reuse.NEVER}, lambda found: found.reuse),
    "monthly_budget": ({"monthly_budget": 50.0}, lambda found: found.monthly_budget),
    "max_uses": ({"lifetimes": replace(LIFETIMES, max_uses=3)}, lambda found: found.lifetimes.max_uses),
    "boot-delay-s": ({"launch": {"boot-delay-s": "2"}}, lambda found: found.launch),
    "runner_sets": (
        {"runner_sets": (RunnerSet(name="few", labels=("few",), resource_class="large", scope=SCOPE, max=2),)},
        lambda found: found.runner_sets,
    ),
}


@pytest.mark.parametrize("name", SET_MEANWHILE)
async def test_what_a_refresh_does_not_set_stays_although_it_changes_meanwhile(world: PoolWorld, name: str) -> None:
    """At whatever call of the refresh."""
    changed, value_of = SET_MEANWHILE[name]
    before, at_call = config(world), 0
    while True:
        at_call += 1
        calls = 0
        world.database.config = before

        async def hook(_name: str, call: Call, at_call: int = at_call) -> Any:
            nonlocal calls
            calls += 1
            if calls == at_call:
                others = frozenset({*SET_MEANWHILE, "idle_time_s"} - {name})
                await refresh(world.process(credentialed=True), world.configuration(**changed, unset=others))
            return await call()

        await world.pass_time(1)
        unset = frozenset({name})
        settings = world.configuration(lifetimes=replace(LIFETIMES, idle_time_s=33.0), unset=unset)
        await refresh(world.process(hook, credentialed=True), settings)
        if calls < at_call:
            assert at_call > 3
            return
        expected = PoolWorld().configuration(**changed)
        assert value_of(config(world)) == value_of(expected), f"changed before call {at_call}"
        assert config(world).lifetimes.idle_time_s == 33.0


async def test_configuration_write_with_a_lost_answer_is_found_by_the_next_refresh() -> None:
    world = PoolWorld()
    hook = AmbiguousAnswer("store.put_config", applied=True)
    with pytest.raises(Unavailable):
        await refresh(world.process(hook, credentialed=True), world.configuration())
    assert (await world.configure()).applied == ()


async def test_tokens_are_not_logged(world: PoolWorld) -> None:
    await world.provision()
    texts = repr(config(world)) + repr(world.database.instances)
    assert not [token for token in world.github._tokens if token in texts]


async def test_tokens_that_another_refresh_made_later_stay(world: PoolWorld) -> None:
    """A refresh that was slow to write its configuration does not replace them by its own."""
    await world.pass_time(900, sweeps=False)
    fresher: list[PoolConfig] = []

    async def hook(name: str, call: Call) -> Any:
        if name == "store.put_config" and not fresher:
            await world.pass_time(60, sweeps=False)
            await world.configure()
            fresher.append(config(world))
        return await call()

    slow = world.configuration(max_instances=7)
    await refresh(world.process(hook, credentialed=True), slow)
    assert config(world).max_instances == 7
    assert config(world).tokens == fresher[0].tokens
