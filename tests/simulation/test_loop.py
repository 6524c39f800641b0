"""The event loop of simulations: time that jumps, rng with a seed, processes that die and stand still."""

from __future__ import annotations

import asyncio
import random  # noqa: TID251 - rng with a seed
from collections.abc import Coroutine
from typing import Any

import pytest

from simulation.loop import START, Interruption, VirtualProcess, Deadlock, VirtualClock, VirtualLoop, new_loop, without_gc


def run(work: Any, seed: int = 1) -> Any:
    with without_gc():
        return live(work, seed)


def live(work: Any, seed: int) -> Any:
    loop = new_loop(random.Random(seed))  # noqa: S311 - rng with a seed
    return loop.run(work(loop))


def test_time_jumps_to_the_next_timer():
    async def work(loop: VirtualLoop) -> float:
        await asyncio.sleep(86_400)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(30):
                await asyncio.Event().wait()
        return loop.time()

    assert run(work) == 86_430


def test_a_cancelled_timer_does_not_move_time():
    async def work(loop: VirtualLoop) -> float:
        loop.call_later(1_000, lambda: None).cancel()
        await asyncio.sleep(1)
        return loop.time()

    assert run(work) == 1


def test_waiting_for_nothing_is_told():
    async def work(_: VirtualLoop) -> None:
        await asyncio.Event().wait()

    with pytest.raises(Deadlock):
        run(work)


def order_of(seed: int) -> list[int]:
    async def work(_: VirtualLoop) -> list[int]:
        order: list[int] = []

        async def one(number: int) -> None:
            await asyncio.sleep(1)
            order.append(number)

        await asyncio.gather(*(one(number) for number in range(8)))
        return order

    found: list[int] = run(work, seed)
    return found


def test_what_is_ready_comes_in_an_order_that_the_seed_decides():
    assert order_of(1) == order_of(1)
    assert len({tuple(order_of(seed)) for seed in range(10)}) > 5


def process(loop: VirtualLoop, work: Coroutine[Any, Any, Any], **given: Any) -> VirtualProcess:
    made = VirtualProcess(loop, "one", **given)
    made.start(work)
    return made


def test_a_crash_runs_no_clean_up():
    async def work(loop: VirtualLoop) -> list[str]:
        told: list[str] = []

        async def victim() -> None:
            try:
                while True:
                    await asyncio.sleep(1)
                    told.append("alive")
            finally:
                told.append("cleaned up")

        one = process(loop, victim())
        await asyncio.sleep(2.5)
        one.crash()
        await asyncio.sleep(100)
        return [*told]

    assert run(work) == ["alive", "alive"]


@pytest.mark.parametrize("step", range(1, 8))
def test_a_process_can_be_cut_at_each_step(step: int):
    async def work(loop: VirtualLoop) -> tuple[int, bool]:
        done: list[int] = []

        async def victim() -> None:
            for number in range(20):
                await asyncio.sleep(1)
                done.append(number)

        one = process(loop, victim(), interruptions=[Interruption(step=step)])
        await asyncio.sleep(100)
        return len(done), one.dead

    done, dead = run(work)
    assert dead
    assert done < step


def test_a_paused_process_goes_on_where_it_was():
    async def work(loop: VirtualLoop) -> list[float]:
        at: list[float] = []

        async def victim() -> None:
            for _ in range(3):
                await asyncio.sleep(1)
                at.append(loop.time())

        process(loop, victim(), interruptions=[Interruption(step=4, pause_s=50.0)])
        await asyncio.sleep(200)
        return [*at]

    first, *late = run(work)
    assert first == 1
    assert all(moment > 50 for moment in late)
    assert len(late) == 2


def test_what_a_process_starts_belongs_to_it():
    async def work(loop: VirtualLoop) -> list[str]:
        told: list[str] = []

        async def child() -> None:
            await asyncio.sleep(5)
            told.append("child")

        async def parent() -> None:
            task = asyncio.create_task(child())
            loop.call_later(5, told.append, "timer")
            await task

        one = process(loop, parent())
        await asyncio.sleep(1)
        one.crash()
        await asyncio.sleep(100)
        return [*told]

    assert run(work) == []


def test_a_skewed_clock_is_off_and_its_monotonic_is_not():
    async def work(loop: VirtualLoop) -> tuple[float, float]:
        skewed = VirtualClock(loop, VirtualProcess(loop, "one", skew_s=-30.0))
        await asyncio.sleep(10)
        return (skewed.now() - START).total_seconds(), skewed.monotonic()

    assert run(work) == (-20.0, 10.0)


def test_an_error_that_nobody_catches_ends_the_run():
    async def work(loop: VirtualLoop) -> None:
        loop.call_later(1, lambda: 1 // 0)
        await asyncio.sleep(10)

    with pytest.raises(ZeroDivisionError):
        run(work)
