"""Arbitrary input of an agent on its machine: metadata, files written by jobs, log lines."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from remuda.adapters.aws.imds import MAX_RESPONSE_BYTES, STATE_FILE, TIMERS, Ec2Machine, Imds
from remuda.adapters.aws.user_data import MachineLayout
from remuda.adapters.local import folder as machine_folder
from remuda.adapters.local.folder import supervisor
from remuda.adapters.local.machine import MachineRecord, read_record
from remuda.agent.job_folders import JobFolders
from remuda.agent.job_hook import JobHook
from remuda.agent.listener import _JobLog
from remuda.agent.loop import Expiry
from remuda.agent.processes import KillResult
from remuda.agent.runner import ActionsRunner, _describe_result
from remuda.domain.errors import RemudaError
from remuda.domain.serialization import from_document, to_document
from remuda.domain.signals import MAX_DURATION_S, Report
from remuda.http import ClientResponse, ResponseTooLong
from remuda.ports.machine import AgentState, Identity, RunnerState, ScriptStatus, StepResult
from simulation.loop import VirtualClock
from tests.support.mutations import ESCAPES, LONE, TEXTS, check_shown, fuzzed, in_virtual_time, spoiled_text
from tests.support.records import NOW

ONE = "i-0123456789abcdef0"
texts = st.sampled_from(TEXTS) | st.text(max_size=20)
bodies = texts.map(lambda text: text.encode(errors="replace")) | st.binary(max_size=20)


RECORD = MachineRecord(
    instance_id=ONE,
    pool="p",
    instance_type="c6i.large",
    cpu=2,
    memory_mib=4_096,
    tags={"remuda:pool": "p"},
    launched_at=NOW,
    first_life_s=300.0,
    margin_s=1.0,
    runner_source="/opt/runner",
)


class _Metadata:
    """Replaces the connections to the metadata service."""

    def __init__(self) -> None:
        self.token, self.status = b"token", 200
        self.values: dict[str, bytes] = {}

    async def request(self, method: str, target: str, *, headers: Mapping[str, str]) -> ClientResponse:
        # What the real connections accept.
        assert all(re.fullmatch("[!-~]+", value) for value in headers.values())
        if method == "PUT":
            return ClientResponse(self.status, {}, self.token)
        found = self.values.get(target.removeprefix("/latest/meta-data/"))
        if len(found or b"") > MAX_RESPONSE_BYTES:
            raise ResponseTooLong("too long")
        return ClientResponse(404 if found is None else self.status, {}, found or b"")


class FuzzedMachine:
    """An EC2 machine with fake metadata, created once."""

    def __init__(self, folder: Path) -> None:
        async def clean() -> StepResult:
            return StepResult(ok=True)

        self.folder = folder
        self.metadata = _Metadata()
        self.imds = Imds(endpoint="http://127.0.0.1:1", clock=VirtualClock())
        self.imds._http = self.metadata  # type: ignore[assignment]
        self.agent = Ec2Machine(
            imds=self.imds, clock=VirtualClock(), reset=clean, layout=MachineLayout(state=str(folder)), run=lambda _: 0
        )

    def set_metadata(self, **changed: bytes) -> None:
        self.imds._token_until = -1.0
        self.agent._is_spot, self.agent._notice = None, ""
        self.metadata.token, self.metadata.status = b"token", 200
        self.metadata.values = {
            "instance-id": ONE.encode(),
            "instance-life-cycle": b"spot",
            "tags/instance/remuda:pool": b"pool",
            "tags/instance/remuda:margin-s": b"60",
            **changed,
        }

    def call(self, work: Awaitable[Any]) -> Any:
        found = in_virtual_time(work, 60)
        return None if isinstance(found, RemudaError) else found


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FuzzedMachine]:
    yield FuzzedMachine(tmp_path_factory.mktemp("machine"))  # noqa: PT022 - the transport holds nothing


@fuzzed()
@given(
    token=bodies,
    identifier=st.just(ONE.encode()) | bodies,
    margin=bodies,
    pool=bodies,
    status=st.sampled_from([200, 200, 401, 500]),
)
@example(token="tök\r\nx: y".encode(), identifier=ONE.encode(), margin=b"60", pool=b"p", status=200)
@example(token=b"", identifier=ONE.encode(), margin=b"60", pool=b"p", status=200)
@example(token=b"t", identifier=ONE.encode(), margin=b"1e300", pool=b"p", status=200)
@example(token=b"t", identifier=ONE.encode(), margin=b"nan", pool=ESCAPES.encode(), status=200)
@example(token=b"t", identifier=ONE.encode(), margin=b"6" * 100_000, pool=b"p", status=200)
def test_identity(
    machine: FuzzedMachine, token: bytes, identifier: bytes, margin: bytes, pool: bytes, status: int
) -> None:
    machine.set_metadata(
        **{"instance-id": identifier, "tags/instance/remuda:pool": pool, "tags/instance/remuda:margin-s": margin}
    )
    machine.metadata.token, machine.metadata.status = token, status
    found = machine.call(machine.agent.identity())
    if isinstance(found, Identity):
        assert found.instance_id == ONE
        check_shown(found.pool, 256)
        assert NOW + timedelta(seconds=3 * found.margin_s) > NOW - timedelta(seconds=found.margin_s)


@fuzzed()
@given(action=spoiled_text({"action": "terminate", "time": "2025-05-31T12:00:00Z"}), advice=bodies)
@example(action=b"[" * 100_000, advice=b"")
@example(action=b'{"action":"\\ud800\\u001b[2J","time":"x\\ny"}', advice=b"")
@example(action=b"x" * 1_000_000, advice=b"")
def test_spot_notice(machine: FuzzedMachine, action: bytes, advice: bytes) -> None:
    """It never fails a heartbeat, and its text can be shown and stored."""
    machine.set_metadata(**{"spot/instance-action": action, "events/recommendations/rebalance": advice})
    notice = machine.call(machine.agent.spot_notice())
    assert notice is not None
    check_shown(notice, 500)


@fuzzed()
@given(memory=spoiled_text(to_document(AgentState(script=ScriptStatus.OK, threshold=NOW))), timers=bodies)
@example(memory=b'{"threshold":"9999-12-31T23:59:59.999Z"}', timers=b"remuda-dead-man-1\nsshd\n")
@example(memory=b'{"threshold":"0001-01-01T00:00:00.000Z"}', timers=b"")
def test_stored_agent_state(machine: FuzzedMachine, memory: bytes, timers: bytes) -> None:
    """A starting agent sets its timer and stops no units but its own timers."""
    (machine.folder / STATE_FILE).write_bytes(memory)
    (machine.folder / TIMERS).write_bytes(timers)
    stopped: list[str] = []

    def run(command: Any) -> int:
        stopped.extend(command[2:] if command[:2] == ["systemctl", "stop"] else [])
        return 0

    machine.agent._run = run

    async def start() -> bool:
        return Expiry(machine=machine.agent, clock=VirtualClock(), margin_s=60.0).has_passed(RunnerState())

    assert machine.call(start()) is not None
    assert all(name.startswith("remuda-dead-man-") for name in stopped)


# Files that jobs can write to -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runner")


@fuzzed()
@given(
    settings=spoiled_text({"agentName": "remuda-x", "agentId": 1}),
    pid=st.integers(-1, 2**70).map(lambda number: b"%d (sh) S" % number + b" 1" * 49) | bodies,
    exit_code=st.integers(-300, 2**70).map(lambda number: str(number).encode()) | bodies,
    jit=spoiled_text({"runnerName": "remuda-y", "config": "x"}),
    log=bodies,
)
@example(settings=b"[" * 100_000, pid=b"1", exit_code=b"", jit=b"{}", log=b"")
@example(settings=b"\xef\xbb\xbf{}", pid=b"9" * 5_000, exit_code=b"9" * 5_000, jit=b"", log=b"")
@example(settings=b'{"agentName":"\\ud800"}', pid=b"-1", exit_code=b"\xff", jit=b"{}", log=b"")
@example(settings=b"{}", pid=b"\xff", exit_code=b"0", jit=b"{}", log=b"")
@example(settings=b"{}", pid=b"1 (sh) S" + b" 9" * 20, exit_code=b"0", jit=b"{}", log=b"")
@example(settings=b"{}", pid=b"1 )(", exit_code=b"0", jit=b"{}", log=b"")
def test_runner_directory(place: Path, settings: bytes, pid: bytes, exit_code: bytes, jit: bytes, log: bytes) -> None:
    runner_folder = place / "runner"
    runner_folder.mkdir(exist_ok=True)
    (runner_folder / ".runner").write_bytes(settings)
    (place / "listener.pid").write_bytes(pid)
    (place / "exit-code").write_bytes(exit_code)
    (place / "jit.json").write_bytes(jit)
    (place / "runner.log").write_bytes(log)
    nothing = KillResult(killed=(), survivors=())
    host = JobFolders(place, pristine=place, processes=list, kill=lambda: nothing)
    runner = ActionsRunner(
        host=host,
        config_folder=runner_folder,
        state_folder=place,
        work=place / "work",
        log=place / "runner.log",
        clock=VirtualClock(),
        environment={},
        hook=JobHook(folder=place / "hook", pristine=place, refused_file=place / "notes"),
    )
    state = runner.state()
    assert not state.listening, "no other process is taken for the runner"
    assert isinstance(state.registered_as, str)


@fuzzed()
@given(
    st.lists(
        st.sampled_from([b"Running job: a\n", b"Job a completed with result: Succeeded\n", b"Job "]) | bodies,
        max_size=6,
    )
)
@example([b"Job " * 200_000, b"\n"])
def test_listener_output(place: Path, parts: list[bytes]) -> None:
    path = place / "lines.log"
    path.write_bytes(b"".join(parts))
    assert _JobLog(path).is_running() in {True, False}


@fuzzed()
@given(st.none() | st.integers(-5, 300), st.text(max_size=200) | texts)
def test_program_output(code: int | None, output: str) -> None:
    """The output of a program becomes the detail of a report."""
    detail = Report(instance_id=ONE, detail=_describe_result(code, output)).detail
    check_shown(detail, 1_000)


@fuzzed()
@given(st.floats() | st.integers() | texts)
@example(10**400)
@example(-1)
def test_a_reported_duration_is_plausible_or_ignored(duration: Any) -> None:
    """It is stored in the provision record: a number that cannot be stored would fail the commit."""
    try:
        found = from_document(Report, {"instanceId": ONE, "durationS": duration}).duration_s
    except ValueError:
        return
    assert found is None or 0 <= found <= MAX_DURATION_S


@fuzzed()
@given(record=spoiled_text(to_document(RECORD)), power=bodies)
@example(record=json.dumps({**to_document(RECORD), "marginS": 1e300}).encode(), power=b"1 2 3")
@example(record=b"[" * 100_000, power=b"9" * 5_000)
def test_directory_of_a_local_machine(place: Path, record: bytes, power: bytes) -> None:
    own = place / ONE
    own.mkdir(exist_ok=True)
    (own / machine_folder.RECORD).write_bytes(record)
    (own / machine_folder.POWER).write_bytes(power)
    found = read_record(own)
    if found is not None:
        assert found.instance_id == ONE
        assert NOW + timedelta(seconds=2 * found.margin_s + found.first_life_s) >= NOW
    pids = supervisor(str(own))
    assert pids is None or all(isinstance(number, int) for number in pids)


def test_undecodable_bytes_are_escaped() -> None:
    assert json.loads(json.dumps(Report(instance_id=ONE, detail=f"a{LONE}b\nc").detail)) == "a\\ud800b c"
