"""The virtual event loop: time, order of callbacks, crashes and pauses of processes."""

from __future__ import annotations

import asyncio
import random  # noqa: TID251 - seeded
from collections.abc import Coroutine
from typing import Any

import pytest

from simulation.loop import (
    START,
    Deadlock,
    Interruption,
    Livelock,
    VirtualClock,
    VirtualLoop,
    VirtualProcess,
    new_loop,
    without_gc,
)


def run(work: Any, seed: int = 1) -> Any:
    with without_gc():
        return run_with_gc(work, seed)


def run_with_gc(work: Any, seed: int) -> Any:
    loop = new_loop(random.Random(seed))  # noqa: S311 - seeded
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


def test_steps_without_an_end_are_found():
    async def work(loop: VirtualLoop) -> None:
        def again() -> None:
            loop.call_soon(again)

        again()
        await asyncio.Event().wait()

    with pytest.raises(Livelock):
        run(work)


def test_waiting_forever_is_an_error():
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


def test_the_seed_decides_the_order_of_ready_callbacks():
    assert order_of(1) == order_of(1)
    assert len({tuple(order_of(seed)) for seed in range(10)}) > 5


def process(loop: VirtualLoop, work: Coroutine[Any, Any, Any], **given: Any) -> VirtualProcess:
    made = VirtualProcess(loop, "one", **given)
    made.start(work)
    return made


def test_a_crash_runs_no_clean_up():
    async def work(loop: VirtualLoop) -> list[str]:
        events: list[str] = []

        async def victim() -> None:
            try:
                while True:
                    await asyncio.sleep(1)
                    events.append("alive")
            finally:
                events.append("cleaned up")

        one = process(loop, victim())
        await asyncio.sleep(2.5)
        one.crash()
        await asyncio.sleep(100)
        return [*events]

    assert run(work) == ["alive", "alive"]


@pytest.mark.parametrize("step", range(1, 8))
def test_a_process_can_crash_before_each_step(step: int):
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


def test_a_paused_process_continues_where_it_was():
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


def test_tasks_and_timers_of_a_process_crash_with_it():
    async def work(loop: VirtualLoop) -> list[str]:
        events: list[str] = []

        async def child() -> None:
            await asyncio.sleep(5)
            events.append("child")

        async def parent() -> None:
            task = asyncio.create_task(child())
            loop.call_later(5, events.append, "timer")
            await task

        one = process(loop, parent())
        await asyncio.sleep(1)
        one.crash()
        await asyncio.sleep(100)
        return [*events]

    assert run(work) == []


def test_skew_moves_the_wall_clock_only():
    async def work(loop: VirtualLoop) -> tuple[float, float]:
        skewed = VirtualClock(loop, VirtualProcess(loop, "one", skew_s=-30.0))
        await asyncio.sleep(10)
        return (skewed.now() - START).total_seconds(), skewed.monotonic()

    assert run(work) == (-20.0, 10.0)


def test_an_unhandled_error_ends_the_run():
    async def work(loop: VirtualLoop) -> None:
        loop.call_later(1, lambda: 1 // 0)
        await asyncio.sleep(10)

    with pytest.raises(ZeroDivisionError):
        run(work)
