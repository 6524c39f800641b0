"""What must hold on an instance at every moment, whatever was cut or failed before."""

from __future__ import annotations

import json
import os
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from remuda.agent.job_hook import REFUSED
from remuda.agent.loop import DEAD_MAN_SLACK_S
from remuda.agent.sandbox_root import JOB_USER_ID
from remuda.domain.instance import Instance, State
from remuda.domain.serialization import from_document
from remuda.domain.signals import Signal
from remuda.ports.machine import AgentState
from simulation.loop import START
from tests.support.effects.host import CGROUPS, REBOOT_TIMER, STATE, STORAGE, Effect, ModelHost

if TYPE_CHECKING:
    from tests.support.effects.programs import Job, ModelGitHub, Sandbox

MARGIN_S = 1.0
#: Seconds by which a timer may differ from the record: it is set in whole seconds, and a step takes time.
TIMER_TOLERANCE_S = 2.0
#: Files of the agent in which a just-in-time configuration may be while the listener has not been started.
JIT_FILES = (f"{STATE}/jit.json", f"{STATE}/.jit.json.new")
#: A phase: the failure of the assignment was signalled, and nobody has noticed it yet.
FAILED = "failed"
#: Ends of the life of an instance that nobody has to explain: the control plane has decided it.
ENDED = frozenset({State.TERMINATING, State.TERMINATED})


class Judge:
    def __init__(self, host: ModelHost, github: ModelGitHub) -> None:
        self._host = host
        self._github = github
        host.judge = self
        self.violations: list[str] = []
        #: By effect, the assignment and its state, or that its failure was signalled.
        self.phases: list[str] = []
        #: By runner name: the repository and tier that it serves, as in the name of a cache volume; empty if unknown.
        self.holders: dict[str, str] = {}
        #: By runner name: the tokens that belong to it.
        self.tokens: dict[str, tuple[str, str]] = {}
        self.record: Instance | None = None
        #: Settings of the kernel before the first job.
        self.kernel = dict(host.kernel)
        self._numbers: set[str] = set()
        self._has_script_ended = False
        self._is_ready = False
        self._is_rebooting = False
        #: Runners whose only job has ended.
        self.spent: set[str] = set()
        #: Runners whose failure the store knows.
        self.failed: set[str] = set()
        #: Registrations whose files `config.sh` has written completely.
        self.complete: set[str] = set()

    def violate(self, text: str) -> None:
        last = f"; after {self._host.effects[-1]}" if self._host.effects else ""
        self.violations.append(f"{self._host.now():.2f} s: {text}{last}")

    # Called by the host

    def effect(self, effect: Effect, content: bytes) -> None:
        self.phases.append(self._phase())
        if self._host.armed is None:
            self.violate("no dead-man timer is set")
        if not content:
            return
        text = content.decode(errors="replace")
        for tokens in self.tokens.values():
            if any(token in text for token in tokens):
                self.violate(f"a token is written to {effect.target}")
        if "configuration of " in text and effect.target not in JIT_FILES:
            self.violate(f"a just-in-time configuration is written to {effect.target}")

    def _phase(self) -> str:
        record = self.record
        if record is None:
            return ""
        assigned = record.assignment
        has_failed = assigned is not None and assigned.runner_name in self.failed
        return f"{record.epoch} {FAILED if has_failed else record.state}"

    def made_folder(self, path: str) -> None:
        folder, _, name = path.rpartition("/")
        if folder == STORAGE and name.isdecimal():
            if name in self._numbers:
                self.violate(f"the number {name} of a sandbox is used again")
            self._numbers.add(name)

    def powers_off(self, why: str) -> None:
        record = self.record
        if record is None or record.state in ENDED:
            return
        left_s = (record.deadline(busy=True) - START).total_seconds() + MARGIN_S - self._host.now()
        if left_s > 0:
            self.violate(f"the instance ends {left_s:.0f} s too early, in state {record.state}: {why}")

    def reboots(self) -> None:
        self._is_rebooting = True

    def rebooted(self) -> None:
        self._is_rebooting = False

    # Called by programs

    def script_starts(self) -> None:
        running = [each for each in self._host.processes.values() if each.name == "pre-runner.sh"]
        if self._is_ready:
            self.violate("the pre-runner script runs on an instance that counts as ready")
        if len(running) > 1:
            self.violate("two pre-runner scripts run at once")
        if self._live():
            self.violate("a sandbox exists before the pre-runner script has ended")

    def script_ends(self) -> None:
        self._has_script_ended = True

    def container_starts(self, sandbox: Sandbox) -> None:
        running = any(each.name == "pre-runner.sh" for each in self._host.processes.values())
        if running or not self._has_script_ended:
            self.violate("a sandbox is made before the pre-runner script has ended")
        others = [each for each in self._host.programs.sandboxes if each is not sandbox]
        if any(each.number == sandbox.number for each in others):
            self.violate(f"the number {sandbox.number} of a sandbox is used again")
        if any(each.alive and each.first_id == sandbox.first_id for each in others):
            self.violate("two sandboxes have the same user ids")

        limits = [f"{sandbox.manager.cgroup}/{name}" for name in ("memory.max", "pids.max")]
        if not all(self._host.exists(limit) and Path(self._host.real(limit)).read_text() for limit in limits):
            self.violate(f"sandbox {sandbox.number} starts without limits")

    def volume_mounted(self, sandbox: Sandbox) -> None:
        owners = {volume.rpartition("/")[0] for volume in sandbox.volumes}
        if len(owners) > 1:
            self.violate(f"sandbox {sandbox.number} has the volumes of several repositories: {sorted(owners)}")
        volume = sandbox.volumes[-1]
        owner = JOB_USER_ID if "/home%runner%" in volume else 0
        if self._host.owners.get(volume, 0) != owner:
            self.violate(f"the cache volume {volume} does not belong to user {owner}")

    def listener_starts(self, sandbox: Sandbox, name: str) -> None:
        if sandbox.runners - {name}:
            self.violate(f"{name} listens in sandbox {sandbox.number}, which {sorted(sandbox.runners)} have used")
        holder = self.holders[name]
        for volume in sandbox.volumes:
            if not holder or not volume.startswith(f"{STATE}/caches/{holder}-"):
                self.violate(f"{name} of {holder or 'no repository'} listens in a sandbox with the volume {volume}")
        if name in self.spent:
            self.violate(f"{name} listens again, after its only job")
        if missing := NETWORK_OF_JOBS - sandbox.network:
            self.violate(f"{name} listens in a sandbox without network: {sorted(missing)}")
        listeners = [each for each in self._host.processes.values() if each.name == "Runner.Listener"]
        if len(listeners) > 1:
            self.violate("two listeners run at once")
        if name in self.failed:
            self.violate(f"{name} listens, and its failure was signalled")
        if not self._host.exists(f"{STORAGE}/kernel.json"):
            self.violate(f"{name} listens, and the state of the kernel before it is not known")
        if not self._host.counts_as_used:
            self.violate(f"{name} listens, and the guard does not know that the sandbox is used")
        for path in self.files_with("configuration of "):
            self.violate(f"jobs may run, and a just-in-time configuration is still in {path}")

    def job_starts(self, job: Job, sandbox: Sandbox) -> None:
        for volume in sandbox.volumes:
            marker = Path(self._host.real(volume), "marker")
            if marker.exists() and marker.read_text() != job.holder:
                self.violate(f"a job of {job.holder} sees the cache of {marker.read_text()}")
            marker.write_text(job.holder)
        refused = f"{STORAGE}/log/outbox/{REFUSED}"
        if self._host.owners.get(refused) != sandbox.first_id + JOB_USER_ID:
            self.violate("the list of refused jobs does not belong to the sandbox")
        if left := Path(self._host.real(refused)).read_text():
            self.violate(f"a job finds {left!r} of an earlier one in the list of refused jobs")
        Path(self._host.real(refused)).write_text(job.holder)

    def job_killed(self, job: Job) -> None:
        is_over = self._host.off or self._is_rebooting or (self.record is not None and self.record.state in ENDED)
        if not is_over:
            self.violate(f"a running job of {job.holder} is killed")

    def registers(self, name: str, token: str) -> None:
        if token != self.tokens[name][0]:
            self.violate(f"{name} registers with the token {token}")

    def unregisters(self, name: str, token: str) -> None:
        if token != self.tokens[name][1]:
            self.violate(f"the registration of {name} is removed with the token {token}")

    # Called by the store

    def reads(self) -> None:
        """The agent reads the record. Until it has, the last threshold on disk decides, or the one it has just read."""
        saved = self._saved()
        if saved is None:
            return
        last = saved.busy_threshold or saved.threshold
        current = None if self.record is None else self.record.deadline(busy=True)
        armed_s = self._host.armed
        # One that is due already is set to the next second.
        expected = [max(_dead_man_s(each), self._host.now()) for each in (last, current) if each is not None]
        if armed_s is None or all(abs(armed_s - each) > TIMER_TOLERANCE_S for each in expected):
            self.violate(f"the first dead-man timer is at {armed_s} s; those of disk and record are {expected}")

    def _saved(self) -> AgentState | None:
        """What the agent has saved; None if it knows no threshold yet."""
        path = f"{STATE}/state.json"
        if not self._host.exists(path):
            return None
        saved = from_document(AgentState, json.loads(Path(self._host.real(path)).read_text()))
        return None if saved.threshold is None else saved

    def waits(self, record: Instance | None) -> None:
        """The agent has nothing to do until the record or the runner changes."""
        if record is None or record.state in ENDED:
            return
        expected_s = _dead_man_s(record.deadline(busy=True))
        armed_s = self._host.armed
        if armed_s is None or abs(armed_s - expected_s) > TIMER_TOLERANCE_S:
            self.violate(f"the first dead-man timer is at {armed_s} s; that of the record is {expected_s} s")
        saved = self._saved()
        thresholds = None if saved is None else (saved.threshold, saved.busy_threshold or saved.threshold)
        if thresholds != (record.deadline(busy=False), record.deadline(busy=True)):
            self.violate(f"the thresholds on disk are {thresholds}; that of the record is {record.threshold}")
        noted = Path(self._host.real(f"{STATE}/dead-man")).read_text().split()
        if unknown := set(self._host.timers) - {*noted, REBOOT_TIMER}:
            self.violate(f"nobody will stop the dead-man timers {sorted(unknown)}")
        if record.state is State.IDLE:
            for path in self.files_with("configuration of ", "private "):
                self.violate(f"the instance is idle, and a credential is left in {path}")
            if any(each.name == "Runner.Listener" for each in self._host.processes.values()):
                self.violate("the instance is idle, and a listener runs")

    def signals(self, signal: Signal, name: str) -> None:
        """The agent is about to send a signal of the assignment with this runner name."""
        registration = self._github.registrations.get(name)
        if signal is Signal.UD_REG_OK and registration is None and name in self.tokens:
            self.violate(f"{name} is signalled as registered, and GitHub does not know it")
        if signal is Signal.UD_REMOVE_REG_OK and registration is not None and name in self.complete:
            self.violate(f"the registration {name} is lost sight of")
        if signal is Signal.UD_REMOVE_REG_REMOVE_RUN_OK:
            self._check_reset()

    def signalled(self, signal: Signal, name: str) -> None:
        """The store has the signal of an agent."""
        self._is_ready |= signal is Signal.UD_OK
        if signal.failed:
            self.failed.add(name)

    def _check_reset(self) -> None:
        if self._host.kernel != self.kernel:
            self.violate(f"reset is signalled, and the kernel has changed to {self._host.kernel}")
        if self._host.counts_as_used:
            self.violate("reset is signalled, and the guard takes the new sandbox for a used one")
        if left := self._used_folders():
            self.violate(f"reset is signalled, and the folders of the used sandboxes {left} exist")
        used = [each for each in self._live() if each.runners or each.volumes]
        if used:
            self.violate(f"reset is signalled, and the used sandboxes {[each.number for each in used]} exist")
        live = {str(each.number) for each in self._live()}
        for mount in self._host.mounts:
            number = mount.target.removeprefix(f"{STORAGE}/").split("/")[0]
            if number.isdecimal() and number not in live and not self._is_preparing(number):
                self.violate(f"reset is signalled, and {mount.target} is still mounted")

    def _used_folders(self) -> list[int]:
        """Sandboxes with runners or volumes whose folder or cgroup is where it was. Discarded ones are moved aside."""
        return [
            each.number
            for each in self._host.programs.sandboxes
            if (each.runners or each.volumes)
            and any(
                self._host.exists(path)
                for path in (f"{STORAGE}/{each.number}", f"{CGROUPS}/remuda/remuda-{each.number}")
            )
        ]

    def _is_preparing(self, number: str) -> bool:
        return not any(str(each.number) == number for each in self._host.programs.sandboxes)

    def _live(self) -> list[Sandbox]:
        return [each for each in self._host.programs.sandboxes if each.alive]

    def files_with(self, *texts: str) -> list[str]:
        """The agent's files with one of these texts. Those of sandboxes and volumes belong to jobs."""
        found = []
        for folder in (STATE, f"{STATE}/registration/root"):
            if not self._host.exists(folder):
                continue
            with os.scandir(self._host.real(folder)) as entries:
                for entry in entries:
                    content = Path(entry.path).read_text() if entry.is_file() else ""
                    found += [f"{folder}/{entry.name}" for text in texts if text in content]
        return found


def _dead_man_s(threshold: datetime) -> float:
    """When a dead-man timer for this threshold powers off."""
    return (threshold - START).total_seconds() + MARGIN_S + max(MARGIN_S, DEAD_MAN_SLACK_S)


#: What `_connect` of the sandboxes must have configured before a job can use the network.
NETWORK_OF_JOBS = frozenset({"host address", "host link", "inside address", "inside link", "inside route"})
