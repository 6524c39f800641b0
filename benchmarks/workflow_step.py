"""Steps of a workflow as the action runs them: through the broker, and direct."""

from __future__ import annotations

import asyncio
import hashlib
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.environment import ROOT, SCOPE, TINY, BenchmarkEnvironment
from benchmarks.figures import Figure, Results, timed
from benchmarks.floor import Floor
from benchmarks.processes import seconds_to_first_call
from remuda.adapters.system.clock import SystemClock
from tests.support.action_steps import ActionResult, copy_action
from tests.support.broker import BrokerStack, start_broker

SECTION = "Workflow step"
REQUEST_LIMIT_S = 0.5
PROVISION_LIMIT_S = 1.5
DIRECT_LIMIT_S = 2.0
#: Installation of the packages in each job of a hosted runner, before there was a bundle.
PREDECESSOR_INSTALLATION = "26–35 s"
#: Start to first call with the packages installed.
PREDECESSOR_START = "1.01 s"


async def run(environment: BenchmarkEnvironment, _floor: Floor) -> Results:
    await environment.clear()
    pool = await environment.pool()
    await pool.fill(1)
    with start_broker(environment.servers, pool.name, scope=SCOPE) as broker:
        # A warm function: its process has answered a request.
        await _step(broker, environment.next_run(), "release")
        requests, provisions = [], []
        for _ in range(environment.size.starts):
            run_id = environment.next_run()
            started = SystemClock().monotonic()
            seen = len(broker.server.arrivals)
            done = await _step(broker, run_id, "provision")
            provisions.append(SystemClock().monotonic() - started)
            requests.append(broker.server.arrivals[seen] - started)
            if done.outputs["reused"] != "1":
                raise RuntimeError("\n".join(done.log))
            await _step(broker, run_id, "release")
    figures = [
        _time("broker: step starts → request sent", requests, REQUEST_LIMIT_S, PREDECESSOR_INSTALLATION),
        _time("broker: warm provision, N = 1, whole step", provisions, PROVISION_LIMIT_S, PREDECESSOR_INSTALLATION),
    ]
    # The bundle takes most of a minute to build.
    if environment.size != TINY:
        figures += await asyncio.to_thread(_direct, environment, pool.name)
    return Results(figures=tuple(figures))


async def _step(broker: BrokerStack, run_id: str, mode: str) -> ActionResult:
    def work() -> ActionResult:
        job = broker.job(run_id, GITHUB_REPOSITORY=SCOPE, **broker.token_variables(run_id, repository=SCOPE))
        return job.run(mode=mode, pool=broker.pool)

    done = await asyncio.to_thread(work)
    if done.code:
        raise RuntimeError("\n".join(done.log))
    return done


def _direct(environment: BenchmarkEnvironment, pool: str) -> list[Figure]:
    first, next_ones = [], []
    with _direct_variables(environment, pool) as (variables, cache):
        command = ["bash", f"{variables['GITHUB_ACTION_PATH']}/deploy/action/direct.sh"]
        for number in range(environment.size.starts):
            # As on a hosted runner, whose tool cache is always new. Not the same folder: deletions slow the disk down.
            step = {**variables, "RUNNER_TOOL_CACHE": str(cache / str(number))}
            first.append(seconds_to_first_call(command, step))
            next_ones.append(seconds_to_first_call(command, step))
    return [
        _time("direct: step starts → first AWS call", first, DIRECT_LIMIT_S, PREDECESSOR_INSTALLATION),
        _time(
            "direct: step starts → first AWS call, bundle in the tool cache",
            next_ones,
            DIRECT_LIMIT_S,
            PREDECESSOR_START,
        ),
    ]


@contextmanager
def _direct_variables(environment: BenchmarkEnvironment, pool: str) -> Iterator[tuple[dict[str, str], Path]]:
    """The variables of a provision step in direct mode, and the folder of its tool cache."""
    with tempfile.TemporaryDirectory(prefix="remuda-direct-") as name:
        folder = Path(name)
        machine, python = platform.machine(), f"{sys.version_info.major}.{sys.version_info.minor}"
        architecture = {"aarch64": "arm64"}.get(machine, machine)
        builder = [sys.executable, str(ROOT / "deploy" / "bundles.py"), "direct", "--to", name]
        only = ["--architecture", architecture, "--python", python]
        subprocess.run([*builder, *only], stdout=subprocess.DEVNULL, check=True)
        (bundle,) = folder.glob("remuda-direct-*.tar.gz")
        cache = folder / "tools"
        yield (
            {
                **environment.servers.environment(REMUDA_GITHUB_TOKEN=""),
                "GITHUB_ACTION_PATH": str(copy_action(folder / "action")),
                "GITHUB_REPOSITORY": SCOPE,
                "GITHUB_RUN_ID": "1",
                "INPUT_MODE": "provision",
                "INPUT_DIRECT": "true",
                "INPUT_POOL": pool,
                "INPUT_DIRECT_BUNDLE": str(bundle),
                "INPUT_DIRECT_BUNDLE_SHA256": hashlib.sha256(bundle.read_bytes()).hexdigest(),
            },
            cache,
        )


def _time(name: str, found: list[float], limit: float, predecessor: str) -> Figure:
    return timed(name, found, limit=limit, predecessor=predecessor, floor=None, section=SECTION)
