"""Explanations of runs and instances: ordered, complete, and from the records alone."""

from __future__ import annotations

import asyncio
import json
from io import StringIO

import pytest

from remuda.cli.rendering.status import explanation_document, explanation_lines, status_document
from remuda.cli.terminal import PlainConsole
from remuda.controlplane.operator import terminate
from remuda.controlplane.read.explain import check_subject, explain
from remuda.controlplane.read.status import status
from remuda.domain.errors import CapacityError, TimedOut, UserError
from remuda.domain.instance import State
from remuda.domain.reporting.explanation import Explanation
from remuda.domain.resources import Reuse, Tier, TypePatterns, UsageClass
from remuda.ports.machine import StepResult
from tests.support.records import instance_id, message
from tests.support.set_world import DemandWorld, runner_set
from tests.support.world import PoolWorld


async def explained(world: PoolWorld, subject: str) -> Explanation:
    explanation = await explain(world.process(), subject)
    times = [line.at for line in explanation.events]
    assert times == sorted(times)
    assert explanation.next_steps
    return explanation


def event_names(explanation: Explanation) -> list[str]:
    return [line.what for line in explanation.events]


def rendered(explanation: Explanation) -> str:
    console = PlainConsole(file=StringIO(), width=200)
    for line in explanation_lines(explanation):
        console.print(line, soft_wrap=True)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


async def test_cold_run_from_request_to_pool(world: PoolWorld) -> None:
    await world.provision("7", count=2)
    await world.release("7")
    explanation = await explained(world, "7")
    assert event_names(explanation) == [
        "attempt 1 requests 2 large runners",
        "launched 2",
        *["boots"] * 2,
        *["registered"] * 2,
        *["running, accepts jobs"] * 2,
        "complete after 2.60 s: 0 reused, 2 created",
        "the run releases its runners",
        *["releasing"] * 2,
        *["idle, clean, in the pool", "announced to the pool (release)"] * 2,
    ]
    assert [sentence.split(": ")[1].split(";")[0] for sentence in explanation.next_steps] == [
        "waits for a run in the pool"
    ] * 2


async def test_warm_run_shows_rejected_candidates_and_claims(world: PoolWorld) -> None:
    (warm,) = await world.warm(1)
    await world.process().pool.send(
        [message(7, usage_class=UsageClass.SPOT), message(8, usage_class=UsageClass.ON_DEMAND)]
    )
    await world.provision("7", count=2)
    explanation = await explained(world, "7")
    reasons = {(line.instance_id, line.what): line.why for line in explanation.events}
    assert reasons[instance_id(7), "candidate rejected: it does not match the request"] == "spot, not on-demand"
    assert reasons[instance_id(8), "claim lost"].startswith("stale pool message")
    assert reasons[warm, "claimed from the pool"] == "matches the request (provision)"
    assert "from the pool" in reasons[warm, "registered"]
    assert (
        explanation.next_steps[0]
        == "the run keeps its runners until remuda release --run-id 7, or until their threshold"
    )
    # Events of the machine before this run are not included.
    assert sum(line.instance_id == warm for line in explanation.events) == 3


async def test_run_whose_machine_serves_another_run(world: PoolWorld) -> None:
    await world.provision("7")
    await world.release("7")
    await world.provision("8")
    explanation = await explained(world, "7")
    assert explanation.next_steps == (f"{world.in_state(State.RUNNING)[0]}: reassigned; it is running, its run is 8",)


async def test_failed_run_shows_the_error(world: PoolWorld) -> None:
    world.cloud.capacity = {"c6i.large": 1}
    with pytest.raises(CapacityError) as failure:
        await world.provision("7", count=2, patterns=TypePatterns(("c6i.large",)))
    explanation = await explained(world, "7")
    reasons = {line.what: line.why for line in explanation.events}
    assert "c6i.large" in reasons["launched 1 of 2"]
    assert reasons["failed after 0.00 s"] == f"{failure.value.message}; {failure.value.fix}"
    assert "locked: it has the pool's tags but no record" in reasons
    assert explanation.title.startswith("Run 7: failed (")


async def test_run_in_progress(world: PoolWorld) -> None:
    world.behaviour.boot_s = 30.0
    provisioning = asyncio.create_task(world.provision("7"))
    await asyncio.sleep(5)
    explanation = await explained(world, "7")
    assert "is in progress; its deadline is in 55 s" in explanation.next_steps[0]
    assert "boots and registers" in explanation.next_steps[1]
    await provisioning


async def test_run_without_a_machine(world: PoolWorld) -> None:
    world.behaviour.boot_s = 1_000.0
    with pytest.raises(TimedOut):
        await world.provision("7")
    await world.pass_time(60)
    explanation = await explained(world, "7")
    assert "terminating, was created" in event_names(explanation)
    assert "terminated" in event_names(explanation)
    assert "terminated (" in explanation.next_steps[0]


async def test_instance_with_two_runs(world: PoolWorld) -> None:
    (machine,) = await world.warm(1)
    await world.provision("7")
    explanation = await explained(world, machine)
    assert [line.what for line in explanation.events if "for run" in line.what] == [
        "boots for run warm-up",
        "claimed from the pool for run 7",
    ]
    assert {line.instance_id for line in explanation.events} == {machine}
    assert "waits for jobs of its run" in explanation.next_steps[0]
    assert "UD_REG_OK, epoch 2" in explanation.next_steps[1]
    assert "class large, trusted, 1 use" in explanation.title
    by_runner = await explained(world, f"remuda-test-2-{machine}")
    assert by_runner == explanation


async def test_termination_shows_its_reason(world: PoolWorld) -> None:
    machine = (await world.one("7")).instance_id
    world.behaviour.resets[machine] = StepResult(ok=False, detail="it would not go")
    await world.release("7")
    await world.pass_time(20)
    explanation = await explained(world, machine)
    (ended,) = [line for line in explanation.events if line.what == "terminating, was releasing"]
    assert "it would not go" in ended.why
    assert ended.severity.value == "bad"


async def test_run_is_explained_after_its_machines_are_terminated(world: PoolWorld) -> None:
    await world.provision("7")
    await world.release("7")
    await world.end()
    await asyncio.sleep(5 * 86_400)
    explanation = await explained(world, "7")
    assert event_names(explanation)[-1] == "terminated"
    assert "its record is kept until" in explanation.next_steps[0]


async def test_unknown_subject_suggests_known_ones(world: PoolWorld) -> None:
    await world.provision("run-70")
    with pytest.raises(UserError) as failure:
        await explain(world.process(), "run-71")
    assert (failure.value.exit_code, "run-70" in failure.value.fix) == (2, True)
    with pytest.raises(UserError) as failure:
        await explain(world.process(), instance_id(999))
    assert world.in_state(State.RUNNING)[0] in failure.value.fix


@pytest.mark.parametrize("subject", ["", "a b", "x" * 100, "-", "i-zzz;", "set.", "set.a b"])
def test_invalid_subject_is_rejected_before_any_call(subject: str) -> None:
    with pytest.raises(UserError) as failure:
        check_subject(subject)
    assert failure.value.field == "RUN|JOB|SET|INSTANCE"


@pytest.mark.parametrize("subject", ["7", "set.large", instance_id(1)])
def test_runs_sets_and_instances_are_valid_subjects(subject: str) -> None:
    assert check_subject(subject) == subject


async def test_control_characters_from_agents_are_removed(world: PoolWorld) -> None:
    machine = (await world.one("7")).instance_id
    world.behaviour.resets[machine] = StepResult(ok=False, detail="\x1b[2J[bold]boo[/bold]\nnext")
    await world.release("7")
    text = rendered(await explained(world, "7"))
    assert "[2J[bold]boo[/bold] next" in text
    assert "\x1b" not in text
    assert all(line.startswith(("Run ", "2025", "  ", "Next")) for line in text.splitlines())


async def test_json_contains_the_same_events(world: PoolWorld) -> None:
    await world.provision("7")
    explanation = await explained(world, "7")
    document = explanation_document(explanation)
    assert (document["kind"], document["subject"]) == ("run", "7")
    assert [line["what"] for line in document["events"]] == event_names(explanation)
    assert document["next"] == list(explanation.next_steps)
    assert document["events"][0]["at"].endswith("Z")


async def test_texts_do_not_repeat_themselves_and_describe_signals(world: PoolWorld) -> None:
    (machine,) = await world.warm(1)
    await world.provision("7")
    world.behaviour.resets[machine] = StepResult(ok=False, detail="it would not go")
    text = rendered(await explained(world, machine))
    assert "boots for run warm-up: launched (provision)" in text
    assert "announced to the pool (release)" in text
    assert "claimed from the pool for run 7: matches the request (provision)" in text
    assert "last signal of its agent: it is registered (UD_REG_OK, epoch 2)" in text
    await world.release("7")
    assert ": it could not be reset (UD_REMOVE_REG_REMOVE_RUN_FAILED, epoch 2): it would not go" in rendered(
        await explained(world, "7")
    )
    assert rendered(await explained(world, "warm-up")).startswith("Run warm-up: released (by attempt 1)\n")
    document = json.dumps(explanation_document(await explained(world, machine)))
    assert "it could not be reset (UD_REMOVE_REG_REMOVE_RUN_FAILED, epoch 2)" in document


async def test_instance_shows_its_repository_and_tier(world: PoolWorld) -> None:
    machine = (await world.one("7", repository="Octo/One", tier=Tier.UNTRUSTED)).instance_id
    assert "untrusted, served only octo/one, " in (await explained(world, machine)).title


@pytest.mark.parametrize(("count", "text"), [(1, "it lost its only instance"), (2, "it lost all 2 of its instances")])
async def test_committed_run_whose_machines_have_ended(world: PoolWorld, count: int, text: str) -> None:
    await world.provision("7", count=count)
    process = world.process()
    assert not (await status(process)).lost
    machines = list((await process.store.get_many(world.in_state(State.RUNNING))).values())
    # Their remaining records are enough to explain the run.
    await terminate(process, machines[1:], reason="enough", dry_run=False)
    assert "keeps its runners" in (await explained(world, "7")).next_steps[0]
    await terminate(process, machines[:1], reason="enough", dry_run=False)
    explanation = await explained(world, "7")
    assert explanation.title == f"Run 7: committed ({text})"
    assert explanation.next_steps[0].startswith(f"{text}: there is nothing to release")
    found = await status(process)
    ids = {item.instance_id for item in machines}
    assert [set(run["lost_ids"]) for run in status_document(found)["runs"]] == [ids]


async def test_launch_reason_of_runs_that_skip_the_pool(world: PoolWorld) -> None:
    await world.provision("7")
    await world.configure(reuse=Reuse.NEVER)
    await world.provision("8")
    await world.provision("9", ephemeral=True, process=world.process(credentialed=True))
    reasons = {
        run: [line.why for line in (await explained(world, run)).events if "launched" in line.what] for run in "789"
    }
    assert reasons == {
        "7": ["the pool has no more matching instances"],
        "8": ["never reused; the pool is not used"],
        "9": ["ephemeral; the pool is not used"],
    }


async def test_set_is_explained_by_its_provisions() -> None:
    sets = DemandWorld()
    await sets.configure_sets(runner_set(), runner_set(name="other", labels=("self-hosted", "other")))
    sets.listen()
    jobs = sets.queue()
    await sets.wait_for_jobs(jobs)
    explanation = await explained(sets, "set.large")
    assert (explanation.kind, explanation.subject) == ("set", "set.large")
    assert any("acquired" in name for name in event_names(explanation))
    assert not (await explained(sets, "set.other")).events
    with pytest.raises(UserError, match="set small"):
        await explained(sets, "set.small")
    await sets.end()
