"""Contract tests of the compute port, over all adapters."""

# The tests wait for other processes, and blocking calls are acceptable.
# ruff: noqa: ASYNC110, ASYNC240

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from remuda import procfs
from remuda.adapters.local import folder
from remuda.adapters.local.compute import LocalCompute
from remuda.adapters.local.launch import DRAFT, LocalLauncher, is_on
from remuda.adapters.local.machine import read_record
from remuda.adapters.local.options import LocalOptions
from remuda.adapters.system.clock import SystemClock, SystemIds
from remuda.domain.errors import CapacityError
from remuda.domain.resources import ResourceClass, RunnerRequest, Tier, TypePatterns, UsageClass, is_instance_id
from remuda.ports.calls import CallCounter
from remuda.ports.compute import POOL_TAG, PROVISION_TAG, Compute, LaunchRequest, LaunchResult, MachineState
from simulation.memory.compute import MemoryCloud, MemoryCompute
from tests.support.aws.ec2 import ec2_fixture
from tests.support.records import LONG_S, launch_request

UNKNOWN = "i-00000000000000000"
LARGE = ResourceClass(name="large", cpu=2, memory_mib=4096)


@dataclass(frozen=True, kw_only=True)
class ComputeBackend:
    """A set of machines, with one compute adapter per pool."""

    open: Callable[[str], Compute]
    #: Launch options that the backend requires.
    launch: dict[str, str] = field(default_factory=dict)


def local_compute(root: Path, pool: str, runner_source: Path, agent: str = "exec sleep 1000") -> LocalCompute:
    return LocalCompute(
        root=root,
        pool=pool,
        runner_source=runner_source,
        agent_command=["/bin/sh", "-c", agent],
        clock=SystemClock(),
        ids=SystemIds(),
        calls=CallCounter(),
        environment={"PATH": os.environ["PATH"]},
    )


@asynccontextmanager
async def local_backend() -> AsyncIterator[ComputeBackend]:
    """Fails if machines or processes are left after their termination."""
    with tempfile.TemporaryDirectory(prefix="remuda-") as folder:
        source = Path(folder) / "source"
        (source / "bin").mkdir(parents=True)
        (source / "config.sh").write_text("#!/bin/sh\n")
        pools: dict[str, LocalCompute] = {}

        def open_compute(pool: str) -> Compute:
            return pools.setdefault(pool, local_compute(Path(folder) / "machines", pool, source))

        yield ComputeBackend(open=open_compute)
        marks = []
        for compute in pools.values():
            known = [view.instance_id for view in await compute.list_pool()]
            assert await compute.terminate(known) == {}
            views = await compute.list_pool()
            assert {view.state for view in views} <= {MachineState.TERMINATED}
            marks += [view.instance_id.encode() for view in views]
            await compute.close()
        assert not [path for path in Path("/proc").glob("[0-9]*/environ") if _has_any(path, marks)]


def _has_any(path: Path, marks: list[bytes]) -> bool:
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return any(mark in content for mark in marks)


@asynccontextmanager
async def memory_backend() -> AsyncIterator[ComputeBackend]:
    cloud = MemoryCloud(clock=SystemClock())
    backend = ComputeBackend(open=lambda pool: MemoryCompute(cloud=cloud, pool=pool, calls=CallCounter()))
    yield backend
    for name, machine in cloud.machines.items():
        await backend.open(machine.pool).terminate([name])
    assert not [name for name in cloud.machines if cloud.is_alive(name)]


@asynccontextmanager
async def ec2_backend() -> AsyncIterator[ComputeBackend]:
    async with ec2_fixture() as made:
        yield ComputeBackend(open=made.compute, launch=made.options)


BACKENDS = {"ec2": ec2_backend, "local": local_backend, "memory": memory_backend}
#: Prefixes of tags that a backend adds.
OWN_TAGS = ("remuda:", "ghr:")


@pytest.fixture(params=sorted(BACKENDS))
async def backend(request: pytest.FixtureRequest) -> AsyncIterator[ComputeBackend]:
    async with BACKENDS[request.param]() as backend:
        yield backend


@pytest.fixture
async def compute(backend: ComputeBackend) -> Compute:
    opened = backend.open("pool")
    await opened.prepare(backend.launch)
    return opened


Wanted = Callable[..., LaunchRequest]


@pytest.fixture
def wanted(backend: ComputeBackend) -> Wanted:
    """Return a function that makes launch requests with the backend's required options."""

    def make(
        token: str = "token", *, count: int = 1, patterns: str = "*", tags: Mapping[str, str] | None = None
    ) -> LaunchRequest:
        return LaunchRequest(
            provision_id=f"provision-{token}",
            client_token=token,
            count=count,
            request=RunnerRequest(
                resource_class=LARGE,
                usage_class=UsageClass.ON_DEMAND,
                patterns=TypePatterns.parse(patterns),
                tier=Tier.TRUSTED,
            ),
            scope="octo/repo",
            launch=backend.launch,
            first_life_s=120,
            margin_s=1,
            tags=tags or {},
        )

    return make


def ids(result: LaunchResult) -> list[str]:
    return [launched.instance_id for launched in result.instances]


async def reaches(compute: Compute, instance_id: str, state: MachineState) -> None:
    async with asyncio.timeout(LONG_S):
        while (await compute.describe([instance_id]))[instance_id].state is not state:
            await asyncio.sleep(0.01)


async def test_second_prepare_changes_nothing(backend: ComputeBackend, compute: Compute) -> None:
    assert list(await compute.prepare(backend.launch)) == []


async def test_machines_have_the_pools_tags(compute: Compute, wanted: Wanted) -> None:
    result = await compute.launch(wanted(count=2, tags={"team": "a"}))

    assert result.errors == ()
    assert len(set(ids(result))) == 2
    assert all(is_instance_id(name) for name in ids(result))
    for name in ids(result):
        await reaches(compute, name, MachineState.RUNNING)
    views = await compute.describe(ids(result))
    for launched in result.instances:
        view = views[launched.instance_id]
        assert view.instance_type == launched.instance_type
        assert view.launched_at.tzinfo is not None
        assert view.tags.items() >= {"team": "a", POOL_TAG: "pool", PROVISION_TAG: "provision-token"}.items()
        assert [key for key in view.tags if not key.startswith(OWN_TAGS)] == ["team"]
    assert sorted(view.instance_id for view in await compute.list_pool()) == sorted(ids(result))


async def test_instance_types_match_the_patterns(compute: Compute, wanted: Wanted) -> None:
    result = await compute.launch(wanted(patterns="r6i.* m6i.xlarge"))
    allowed = TypePatterns.parse("r6i.* m6i.xlarge")
    assert all(allowed.matches(launched.instance_type) for launched in result.instances)


async def test_unknown_type_is_a_capacity_error(compute: Compute, wanted: Wanted) -> None:
    with pytest.raises(CapacityError, match=r"x1\.tiny.*large"):
        await compute.launch(wanted(patterns="x1.tiny"))
    assert list(await compute.list_pool()) == []


async def test_client_token_launches_once(compute: Compute, wanted: Wanted) -> None:
    results = await asyncio.gather(*(compute.launch(wanted(count=2)) for _ in range(3)))
    again = await compute.launch(wanted(count=2))
    assert all(result == again for result in results)
    assert len(await compute.list_pool()) == 2
    other = await compute.launch(wanted("other"))
    assert not set(ids(other)) & set(ids(again))


async def test_client_token_launches_once_even_after_termination(compute: Compute, wanted: Wanted) -> None:
    first = await compute.launch(wanted())
    await compute.terminate(ids(first))
    assert ids(await compute.launch(wanted())) == ids(first)
    await reaches(compute, ids(first)[0], MachineState.TERMINATED)


async def test_unknown_instances_are_omitted(compute: Compute, wanted: Wanted) -> None:
    result = await compute.launch(wanted())
    assert set(await compute.describe([*ids(result), UNKNOWN, "../etc"])) == set(ids(result))
    assert await compute.describe([]) == {}


async def test_terminated_machines_are_still_described(compute: Compute, wanted: Wanted) -> None:
    result = await compute.launch(wanted(count=2))
    assert await compute.terminate(ids(result)) == {}
    for name in ids(result):
        await reaches(compute, name, MachineState.TERMINATED)
    assert {view.state for view in await compute.list_pool()} == {MachineState.TERMINATED}


async def test_terminate_of_a_terminated_machine_succeeds(compute: Compute, wanted: Wanted) -> None:
    result = await compute.launch(wanted())
    assert await compute.terminate([*ids(result), *ids(result), UNKNOWN]) == {}
    assert await compute.terminate(ids(result)) == {}


async def test_machine_of_another_pool_is_rejected(backend: ComputeBackend, compute: Compute, wanted: Wanted) -> None:
    other = backend.open("other")
    await other.prepare(backend.launch)
    theirs, ours = ids(await other.launch(wanted("theirs"))), ids(await compute.launch(wanted("ours")))
    await reaches(other, theirs[0], MachineState.RUNNING)

    refused = await compute.terminate([*theirs, *ours])

    assert list(refused) == theirs
    assert POOL_TAG in refused[theirs[0]]
    assert (await other.describe(theirs))[theirs[0]].state is MachineState.RUNNING
    assert [view.instance_id for view in await other.list_pool()] == theirs
    assert [view.instance_id for view in await compute.list_pool()] == ours


async def test_tag_and_untag(compute: Compute, wanted: Wanted) -> None:
    names = ids(await compute.launch(wanted(count=2)))
    await asyncio.gather(*(compute.tag(names, {f"key-{number}": "value"}) for number in range(10)))
    await compute.tag(names, {"key-0": "new"})
    await compute.untag(names, ["key-1", "absent"])
    for view in (await compute.describe(names)).values():
        assert view.tags["key-0"] == "new"
        assert "key-1" not in view.tags
        assert {f"key-{number}" for number in range(2, 10)} <= set(view.tags)
        assert view.tags[POOL_TAG] == "pool"


# Specific to the local backend


async def test_local_machine_with_an_unreadable_record_is_not_reported_as_terminated(tmp_path: Path) -> None:
    compute = local_compute(tmp_path, "pool", tmp_path)
    (tmp_path / UNKNOWN).mkdir()
    assert await compute.terminate([UNKNOWN]) == {UNKNOWN: "cannot read its record"}


def test_local_machine_is_on_while_its_supervisor_lives(tmp_path: Path) -> None:
    """After its death, a remaining child may still hold the lock."""
    assert not is_on(tmp_path)
    with (tmp_path / folder.POWER).open("wb") as power:
        assert not is_on(tmp_path)
        fcntl.flock(power, fcntl.LOCK_EX)
        # The launcher has the lock before the supervisor starts.
        assert is_on(tmp_path)
        me = procfs.read_process(os.getpid())
        assert me is not None
        folder.write_supervisor(power.fileno(), me.pid, me.started)
        assert is_on(tmp_path)
        folder.write_supervisor(power.fileno(), me.pid, me.started + 1)
        assert not is_on(tmp_path)


def test_local_machine_options_are_parsed() -> None:
    options = LocalOptions.parse({"boot-delay-s": "1.5", "capacity": "3", "fault": "dies-after-s=20"})
    assert options == LocalOptions(boot_delay_s=1.5, capacity=3, dies_after_s=20.0)


async def test_local_launch_deletes_what_an_interrupted_one_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalLauncher, "_start_supervisor", lambda *_: None)
    source = tmp_path / "source"
    source.mkdir()
    compute = local_compute(tmp_path / "machines", "pool", source)
    await compute.prepare({})
    draft = tmp_path / "machines" / f"{DRAFT}{UNKNOWN}"
    draft.mkdir()
    (name,) = ids(await compute.launch(launch_request()))
    assert not draft.exists()
    assert (tmp_path / "machines" / name).exists()


async def test_local_machine_ignores_an_interrupt_and_asks_its_processes_to_end(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    # The agent's output is kept after the end of the machine.
    agent = "trap 'echo asked to end; exit' TERM; echo ready; while :; do sleep 1000 & wait; done"
    compute = local_compute(tmp_path / "machines", "pool", source, agent)
    (name,) = ids(await compute.launch(launch_request()))
    machine = tmp_path / "machines" / name
    log = machine / folder.LOGS / "agent.log"
    async with asyncio.timeout(LONG_S):
        while not log.exists() or "ready" not in log.read_text():
            await asyncio.sleep(0.01)
    supervisor = folder.supervisor(str(machine))
    assert supervisor is not None
    for number in (signal.SIGINT, signal.SIGHUP):
        os.kill(supervisor[0], number)
    assert await compute.terminate([name]) == {}
    record = read_record(machine)
    assert record is not None
    assert (record.reason, record.finished) == ("received SIGTERM", True)
    assert log.read_text().split("\n")[:2] == ["ready", "asked to end"]
    await compute.close()
