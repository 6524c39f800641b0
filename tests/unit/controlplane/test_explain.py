"""Explain: a run's and an instance's story, in order, complete, from the records alone."""

from __future__ import annotations

import asyncio
import json
from io import StringIO

import pytest
from rich.console import Console

from remuda.cli.rendering.explanation import explanation_document, explanation_lines
from remuda.cli.rendering.status import status_document
from remuda.controlplane.operator import terminate
from remuda.controlplane.read.explain import check_subject, explain
from remuda.controlplane.read.status import status
from remuda.domain.errors import CapacityError, TimedOut, UserError
from remuda.domain.instance import State
from remuda.domain.reporting.explanation import Explanation
from remuda.domain.resources import Reuse, Tier, TypePatterns, UsageClass
from remuda.ports.machine import StepResult
from tests.support.records import instance_id, message
from tests.support.world import PoolWorld


async def tell(world: PoolWorld, subject: str) -> Explanation:
    story = await explain(world.process(), subject)
    times = [line.at for line in story.events]
    assert times == sorted(times)
    assert story.next_steps
    return story


def words(story: Explanation) -> list[str]:
    return [line.what for line in story.events]


def shown(story: Explanation) -> str:
    console = Console(file=StringIO(), width=200, highlight=False)
    for line in explanation_lines(story):
        console.print(line, soft_wrap=True)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


async def test_a_cold_run_from_asking_to_the_pool(world: PoolWorld) -> None:
    await world.provision("7", count=2)
    await world.release("7")
    story = await tell(world, "7")
    assert words(story) == [
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
    assert [sentence.split(": ")[1].split(";")[0] for sentence in story.next_steps] == [
        "waits for a run in the pool"
    ] * 2


async def test_a_warm_run_tells_of_candidates_and_claims(world: PoolWorld) -> None:
    (warm,) = await world.warm(1)
    await world.process().pool.send(
        [message(7, usage_class=UsageClass.SPOT), message(8, usage_class=UsageClass.ON_DEMAND)]
    )
    await world.provision("7", count=2)
    story = await tell(world, "7")
    told = {(line.instance_id, line.what): line.why for line in story.events}
    assert told[instance_id(7), "candidate rejected: it does not match the request"] == "spot, not on-demand"
    assert told[instance_id(8), "claim lost"].startswith("stale pool message")
    assert told[warm, "claimed from the pool"] == "matches the request (provision)"
    assert "from the pool" in told[warm, "registered"]
    assert story.next_steps[0] == "the run keeps its runners until remuda release --run-id 7, or until their threshold"
    # The machine's life before this run is not part of it.
    assert sum(line.instance_id == warm for line in story.events) == 3


async def test_a_run_whose_machine_serves_another_by_now(world: PoolWorld) -> None:
    await world.provision("7")
    await world.release("7")
    await world.provision("8")
    story = await tell(world, "7")
    assert story.next_steps == (f"{world.in_state(State.RUNNING)[0]}: reassigned; it is running, its run is 8",)


async def test_a_run_that_failed_says_why(world: PoolWorld) -> None:
    world.cloud.capacity = {"c6i.large": 1}
    with pytest.raises(CapacityError) as failure:
        await world.provision("7", count=2, patterns=TypePatterns(("c6i.large",)))
    story = await tell(world, "7")
    told = {line.what: line.why for line in story.events}
    assert "c6i.large" in told["launched 1 of 2"]
    assert told["failed after 0.00 s"] == failure.value.message[:200]
    assert "locked: it has the pool's tags but no record" in told
    assert story.title.startswith("Run 7: released")


async def test_a_run_that_is_under_way(world: PoolWorld) -> None:
    world.behaviour.boot_s = 30.0
    provisioning = asyncio.create_task(world.provision("7"))
    await asyncio.sleep(5)
    story = await tell(world, "7")
    assert "is in progress; its deadline is in 55 s" in story.next_steps[0]
    assert "boots and registers" in story.next_steps[1]
    await provisioning


async def test_a_run_that_never_got_its_machine(world: PoolWorld) -> None:
    world.behaviour.boot_s = 1_000.0
    with pytest.raises(TimedOut):
        await world.provision("7")
    await world.pass_time(60)
    story = await tell(world, "7")
    assert "terminating, was created" in words(story)
    assert "terminated" in words(story)
    assert "terminated (" in story.next_steps[0]


async def test_an_instance_with_two_runs(world: PoolWorld) -> None:
    (machine,) = await world.warm(1)
    await world.provision("7")
    story = await tell(world, machine)
    assert [line.what for line in story.events if "for run" in line.what] == [
        "boots for run warm-up",
        "claimed from the pool for run 7",
    ]
    assert {line.instance_id for line in story.events} == {machine}
    assert "waits for jobs of its run" in story.next_steps[0]
    assert "UD_REG_OK, epoch 2" in story.next_steps[1]
    assert "class large, trusted, 1 use" in story.title
    by_runner = await tell(world, f"remuda-test-2-{machine}")
    assert by_runner == story


async def test_an_end_says_why_it_came(world: PoolWorld) -> None:
    await world.provision("7")
    machine = world.in_state(State.RUNNING)[0]
    world.behaviour.resets[machine] = StepResult(ok=False, detail="it would not go")
    await world.release("7")
    await world.pass_time(20)
    story = await tell(world, machine)
    (ended,) = [line for line in story.events if line.what == "terminating, was releasing"]
    assert "it would not go" in ended.why
    assert ended.severity.value == "bad"


async def test_it_works_after_the_machines_are_long_gone(world: PoolWorld) -> None:
    await world.provision("7")
    await world.release("7")
    await world.end()
    await asyncio.sleep(5 * 86_400)
    story = await tell(world, "7")
    assert words(story)[-1] == "terminated"
    assert "its record is kept until" in story.next_steps[0]


async def test_what_is_not_known_names_what_is(world: PoolWorld) -> None:
    await world.provision("run-70")
    with pytest.raises(UserError) as failure:
        await explain(world.process(), "run-71")
    assert (failure.value.exit_code, "run-70" in failure.value.fix) == (2, True)
    with pytest.raises(UserError) as failure:
        await explain(world.process(), instance_id(999))
    assert world.in_state(State.RUNNING)[0] in failure.value.fix


@pytest.mark.parametrize("subject", ["", "a b", "x" * 100, "-", "i-zzz;"])
def test_what_cannot_be_a_run_or_an_instance_is_refused_before_any_call(subject: str) -> None:
    with pytest.raises(UserError) as failure:
        check_subject(subject)
    assert failure.value.field == "RUN|INSTANCE"


async def test_what_machines_say_does_not_steer_the_terminal(world: PoolWorld) -> None:
    await world.provision("7")
    machine = world.in_state(State.RUNNING)[0]
    world.behaviour.resets[machine] = StepResult(ok=False, detail="\x1b[2J[bold]boo[/bold]\nnext")
    await world.release("7")
    text = shown(await tell(world, "7"))
    assert "[2J[bold]boo[/bold] next" in text
    assert "\x1b" not in text
    assert all(line.startswith(("Run ", "2025", "  ", "Next")) for line in text.splitlines())


async def test_programs_get_the_same_story(world: PoolWorld) -> None:
    await world.provision("7")
    story = await tell(world, "7")
    document = explanation_document(story)
    assert (document["kind"], document["subject"]) == ("run", "7")
    assert [line["what"] for line in document["events"]] == words(story)
    assert document["next"] == list(story.next_steps)
    assert document["events"][0]["at"].endswith("Z")


async def test_texts_do_not_repeat_themselves_and_describe_signals(world: PoolWorld) -> None:
    (machine,) = await world.warm(1)
    await world.provision("7")
    world.behaviour.resets[machine] = StepResult(ok=False, detail="it would not go")
    text = shown(await tell(world, machine))
    assert "boots for run warm-up: launched (provision)" in text
    assert "announced to the pool (release)" in text
    assert "claimed from the pool for run 7: matches the request (provision)" in text
    assert "last signal of its agent: it is registered (UD_REG_OK, epoch 2)" in text
    await world.release("7")
    assert ": it could not be reset (UD_REMOVE_REG_REMOVE_RUN_FAILED, epoch 2): it would not go" in shown(
        await tell(world, "7")
    )
    assert shown(await tell(world, "warm-up")).startswith("Run warm-up: released (by attempt 1)\n")
    document = json.dumps(explanation_document(await tell(world, machine)))
    assert "it could not be reset (UD_REMOVE_REG_REMOVE_RUN_FAILED, epoch 2)" in document


async def test_an_instance_of_a_repository_names_it_and_its_tier(world: PoolWorld) -> None:
    await world.provision("7", repository="Octo/One", tier=Tier.UNTRUSTED)
    (machine,) = world.in_state(State.RUNNING)
    assert "untrusted, served only octo/one, " in (await tell(world, machine)).title


@pytest.mark.parametrize(
    ("count", "told"), [(1, "its instance is terminated"), (2, "all 2 of its instances are terminated")]
)
async def test_a_committed_run_whose_machines_have_ended(world: PoolWorld, count: int, told: str) -> None:
    await world.provision("7", count=count)
    process = world.process()
    assert not (await status(process)).ended
    machines = list((await process.store.get_many(world.in_state(State.RUNNING))).values())
    # What is left of them is enough to keep the run.
    await terminate(process, machines[1:], reason="enough", dry_run=False)
    assert "keeps its runners" in (await tell(world, "7")).next_steps[0]
    await terminate(process, machines[:1], reason="enough", dry_run=False)
    story = await tell(world, "7")
    assert story.title == f"Run 7: committed; {told}"
    assert story.next_steps[0].startswith(f"{told}: there is nothing to release")
    found = await status(process)
    assert list(found.ended.values()) == [told]
    assert [run["instances_terminated"] for run in status_document(found)["runs"]] == [True]


async def test_a_run_with_machines_of_its_own_does_not_blame_the_pool(world: PoolWorld) -> None:
    await world.provision("7")
    await world.configure(reuse=Reuse.NEVER)
    await world.provision("8")
    await world.provision("9", ephemeral=True, process=world.process(credentialed=True))
    reasons = {run: [line.why for line in (await tell(world, run)).events if "launched" in line.what] for run in "789"}
    assert reasons == {
        "7": ["the pool has no more matching instances"],
        "8": ["never reused; the pool is not used"],
        "9": ["ephemeral; the pool is not used"],
    }
