"""Launches of local machines: idempotent by client token, limited by capacity. Synchronous; called in a thread."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import remuda
from remuda import procfs
from remuda.adapters.local import folder as files
from remuda.adapters.local.machine import MachineRecord
from remuda.adapters.local.options import LocalMachineType, LocalOptions, choose_type
from remuda.domain.errors import CapacityError, Unavailable
from remuda.domain.resources import UsageClass, is_instance_id
from remuda.domain.serialization import from_document, to_document
from remuda.ports.clock import Clock, Ids
from remuda.ports.compute import POOL_TAG, PROVISION_TAG, Launched, LaunchRequest, LaunchResult

#: Prefix of a machine's folder until it is complete.
DRAFT = ".new-"
#: Folder with one launch plan per client token.
LAUNCHES = ".launches"
ROOT_LOCK = ".lock"
#: Concurrent copies of the runner software. The disk limits the speed, so more do not help.
MAX_COPIES = 8
MAX_TOKENS = 1_000
_SOURCE = str(Path(remuda.__file__).parents[1])


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchPlan:
    """The machines of one client token. Written to disk before the first machine is created."""

    instance_ids: tuple[str, ...]
    instance_type: str
    errors: tuple[str, ...] = ()
    #: False until all machines are created or have failed. Another process may have to complete the launch.
    complete: bool = False

    def result(self, usage: UsageClass) -> LaunchResult:
        """Convert to the result. Local machines have any requested usage class."""
        launched = tuple(
            Launched(instance_id=name, instance_type=self.instance_type, usage_class=usage)
            for name in self.instance_ids
        )
        return LaunchResult(instances=launched, errors=self.errors)


class LocalLauncher:
    def __init__(
        self,
        *,
        root: Path,
        pool: str,
        runner_source: Path,
        agent_command: Sequence[str],
        environment: Mapping[str, str],
        clock: Clock,
        ids: Ids,
    ) -> None:
        self._root = root
        self._pool = pool
        self._runner_source = runner_source
        self._agent_command = list(agent_command)
        self._environment = dict(environment)
        self._clock = clock
        self._ids = ids
        #: Pids of supervisors that this process started and must reap.
        self._children: set[int] = set()

    def prepare(self) -> list[str]:
        if self._root.is_dir():
            changes = []
        else:
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            changes = [f"created {self._root}"]
        (self._root / LAUNCHES).mkdir(mode=0o700, exist_ok=True)
        return changes

    def launch(self, request: LaunchRequest) -> LaunchResult:
        options = LocalOptions.parse(request.launch)
        machine_type = choose_type(request.request)
        self.prepare()
        path = self._root / LAUNCHES / hashlib.sha256(request.client_token.encode()).hexdigest()
        # Held until the end: a concurrent launch with the same token waits and returns the same machines.
        with files.locked(f"{path}.lock"):
            plan = _read_plan(path)
            if plan is not None and plan.complete:
                return plan.result(request.request.usage_class)
            power_locks: dict[str, int] = {}
            try:
                if plan is None:
                    plan, power_locks = self._plan(path, request, options, machine_type)
                created, problems = self._create_all(plan, power_locks, request, options, machine_type)
            finally:
                for descriptor in power_locks.values():
                    os.close(descriptor)
            plan = LaunchPlan(
                instance_ids=tuple(created),
                instance_type=plan.instance_type,
                errors=(*plan.errors, *problems),
                complete=True,
            )
            if not created:
                path.unlink()
                raise Unavailable(f"no machine could be created: {problems[0]}")
            files.write(str(path), files.encode(to_document(plan)))
            return plan.result(request.request.usage_class)

    def reap(self) -> None:
        for pid in tuple(self._children):
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(pid, os.WNOHANG)[0] == 0:
                    continue
            self._children.discard(pid)

    # Plan

    def _plan(
        self, path: Path, request: LaunchRequest, options: LocalOptions, machine_type: LocalMachineType
    ) -> tuple[LaunchPlan, dict[str, int]]:
        """Choose the ids and lock the drafts' power files, so that concurrent launches count them."""
        power_locks: dict[str, int] = {}
        with self._root_locked():
            count, errors = self._available(request, options)
            if count == 0:
                raise CapacityError(" ".join(errors))
            self._forget_tokens()
            try:
                while len(power_locks) < count:
                    name = self._new_id()
                    power_locks[name] = self._draft(name)
                plan = LaunchPlan(
                    instance_ids=tuple(power_locks), instance_type=machine_type.name, errors=tuple(errors)
                )
                files.write(str(path), files.encode(to_document(plan)))
            except BaseException:
                for descriptor in power_locks.values():
                    os.close(descriptor)
                raise
        return plan, power_locks

    def _available(self, request: LaunchRequest, options: LocalOptions) -> tuple[int, list[str]]:
        limits: list[tuple[int, str]] = []
        if options.no_capacity:
            limits.append((0, "local: no capacity (fault no-capacity)."))
        if options.partial is not None:
            limits.append((options.partial, f"local: capacity for {options.partial} only (fault partial)."))
        if options.capacity is not None:
            free = max(0, options.capacity - self._live())
            limits.append((free, f"local: {free} of {options.capacity} machines are free, {request.count} requested."))
        exceeded = [(limit, error) for limit, error in limits if limit < request.count]
        return min((limit for limit, _ in exceeded), default=request.count), [error for _, error in exceeded]

    def _live(self) -> int:
        """Count the machines that are powered on, including drafts."""
        return sum(is_instance_id(path.name.removeprefix(DRAFT)) and is_on(path) for path in self._root.iterdir())

    def _root_locked(self) -> AbstractContextManager[None]:
        """Lock against concurrent scans of the root folder. Held while drafts are created or renamed."""
        return files.locked(str(self._root / ROOT_LOCK))

    def _new_id(self) -> str:
        while True:
            # Hashed, so that the id has the form of an EC2 instance id.
            name = "i-" + hashlib.sha256(self._ids.new("machine-").encode()).hexdigest()[:17]
            if not (self._root / name).exists() and not (self._root / f"{DRAFT}{name}").exists():
                return name

    def _draft(self, name: str) -> int:
        draft = self._root / f"{DRAFT}{name}"
        draft.mkdir(mode=0o700)
        return files.power_on(str(draft))

    def _forget_tokens(self) -> None:
        """Delete the oldest plans above the limit."""
        written = [(path.stat().st_mtime, path) for path in (self._root / LAUNCHES).iterdir()]
        # Two files per token: the plan and its lock.
        for _, path in sorted(written, reverse=True)[2 * MAX_TOKENS :]:
            path.unlink(missing_ok=True)

    # Machines

    def _create_all(
        self,
        plan: LaunchPlan,
        power_locks: dict[str, int],
        request: LaunchRequest,
        options: LocalOptions,
        machine_type: LocalMachineType,
    ) -> tuple[list[str], list[str]]:
        def create(name: str) -> str:
            """Create one machine. Return an error, or an empty string."""
            if (self._root / name).exists():
                return ""  # created by an earlier process that did not complete the plan
            if name not in power_locks:
                files.erase([str(self._root / f"{DRAFT}{name}")])
                with self._root_locked():
                    power_locks[name] = self._draft(name)
            try:
                self._fill(name, request, options, machine_type)
                folder = self._root / name
                # Without the lock, a concurrent scan could miss both names.
                with self._root_locked():
                    (self._root / f"{DRAFT}{name}").rename(folder)
                self._start_supervisor(folder, power_locks[name])
            except (OSError, shutil.Error) as problem:
                files.erase([str(self._root / f"{DRAFT}{name}")])
                return f"local: {name} could not be created: {problem}."
            return ""

        with ThreadPoolExecutor(max_workers=min(MAX_COPIES, len(plan.instance_ids))) as threads:
            problems = dict(zip(plan.instance_ids, threads.map(create, plan.instance_ids), strict=True))
        return [name for name in problems if not problems[name]], [text for text in problems.values() if text]

    def _fill(self, name: str, request: LaunchRequest, options: LocalOptions, machine_type: LocalMachineType) -> None:
        draft = self._root / f"{DRAFT}{name}"
        for subfolder in (files.HOME, files.TMP, files.WORK, files.LOGS):
            (draft / subfolder).mkdir(mode=0o700)
        shutil.copytree(self._runner_source, draft / files.RUNNER, symlinks=True)
        record = MachineRecord(
            instance_id=name,
            pool=self._pool,
            instance_type=machine_type.name,
            cpu=machine_type.cpu,
            memory_mib=machine_type.memory_mib,
            tags={**request.tags, POOL_TAG: self._pool, PROVISION_TAG: request.provision_id},
            launched_at=self._clock.now(),
            launch=dict(request.launch),
            first_life_s=request.first_life_s,
            margin_s=request.margin_s,
            runner_source=str(self._runner_source),
        )
        boot = {
            "command": self._agent_command,
            "environment": self._environment,
            "bootDelayS": options.boot_delay_s,
            "firstLifeS": request.first_life_s,
            "neverBoots": options.never_boots,
            "diesAfterS": options.dies_after_s,
        }
        if options.script:
            files.write(str(draft / files.SCRIPT), options.script.encode(), mode=0o700)
        files.write(str(draft / files.BOOT), files.encode(boot))
        files.write(str(draft / files.RECORD), files.encode(to_document(record)))

    def _start_supervisor(self, folder: Path, power: int) -> None:
        command = [sys.executable, "-s", "-S", "-P", "-m", "remuda.adapters.local.supervisor", str(folder), str(power)]
        # The complete environment: the machine inherits nothing from the launcher.
        environment = {"PATH": os.defpath, "PYTHONPATH": _SOURCE, procfs.MARKER: folder.name}
        with (folder / files.LOGS / "machine.log").open("ab") as log:
            process = subprocess.Popen(
                command,
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                pass_fds=(power,),
            )
        # `reap` waits for it; an unfinished Popen object would emit a ResourceWarning.
        process.returncode = 0
        self._children.add(process.pid)
        seen = procfs.read_process(process.pid)
        if seen is not None:
            files.write_supervisor(power, seen.pid, seen.started)


def is_on(folder: Path) -> bool:
    """Whether the power lock is held, and not merely by a remaining child of a dead supervisor."""
    if not files.has_power(str(folder)):
        return False
    known = files.supervisor(str(folder))
    return known is None or procfs.is_alive(*known)


def _read_plan(path: Path) -> LaunchPlan | None:
    document = files.read(str(path))
    if document is None:
        return None
    with contextlib.suppress(ValueError):
        return from_document(LaunchPlan, document)
    return None
