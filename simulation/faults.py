"""Faults that the simulation injects, and the trace of injected faults and all other events."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from remuda.domain.errors import UserError


class Fault(StrEnum):
    """The faults by name, each with a description for the reference page."""

    meaning: str

    def __new__(cls, name: str, meaning: str = "") -> Self:
        fault = str.__new__(cls, name)
        fault._value_ = name
        fault.meaning = meaning
        return fault

    # Store
    WRITE_LOST = "write-lost", "a write fails and was not applied"
    WRITE_UNSURE = "write-unsure", "a write is applied and reported as failed"
    READ_FAILED = "read-failed", "a read fails"
    THROTTLED = "throttled", "for some seconds most calls to the store are throttled"
    STALE_INDEX = "stale-index", "a search returns records as they were up to 20 s ago"
    SHORT_PAGES = "short-pages", "a list comes in pages of 1 to 5, with time between them"
    SLOW_CALL = "slow-call", "a call or its answer takes up to 25 s"
    BATCH_SPLIT = "batch-split", "a batch is read or written in two parts; the second may be late or fail"
    # Pool
    MESSAGE_LOST = "message-lost", "a message that was sent never arrives"
    MESSAGE_TWICE = "message-twice", "a message arrives twice, or reappears before its visibility timeout"
    MESSAGE_LATE = "message-late", "a message arrives up to a minute late"
    MESSAGE_REORDERED = "message-reordered", "a message is overtaken by later ones"
    MESSAGE_MALFORMED = "message-malformed", "a queue contains a message that is not valid"
    RECEIVE_SHORT = "receive-short", "a receive returns fewer messages than there are, or none"
    DELETE_LOST = "delete-lost", "a deleted message comes back"
    POOL_FAILED = "pool-failed", "a call to the queue fails, applied or not"
    # Compute
    FLEET_PARTIAL = "fleet-partial", "a fleet launches fewer instances than requested"
    LAUNCH_UNSURE = "launch-unsure", "a launch succeeds and its answer is lost"
    NO_CAPACITY = "no-capacity", "a launch is refused for capacity"
    DESCRIBE_LAGS = "describe-lags", "EC2 describes machines as they were up to 40 s ago"
    DESCRIBE_PARTIAL = "describe-partial", "EC2 shows new machines one after the other"
    COMPUTE_FAILED = "compute-failed", "a call to EC2 fails, applied or not"
    # GitHub
    LIST_OLD = "list-old", "GitHub lists runners as they were up to a minute ago"
    LIST_MOVES = "list-moves", "GitHub's list misses a runner that moved to another page between two calls"
    BUSY_WRONG = "busy-wrong", "GitHub's busy flag is wrong"
    GITHUB_401 = "github-401", "GitHub rejects a valid credential"
    GITHUB_403 = "github-403", "GitHub denies a permission"
    GITHUB_404 = "github-404", "GitHub answers 'not found' for something that exists"
    GITHUB_422 = "github-422", "GitHub answers that a runner is busy or a request is invalid"
    GITHUB_429 = "github-429", "GitHub limits the request rate"
    GITHUB_5XX = "github-5xx", "GitHub answers with a server error"
    GITHUB_UNSURE = "github-unsure", "GitHub applies a request and its answer is lost"
    GITHUB_HANGS = "github-hangs", "for up to two minutes, each call to GitHub takes as long as its timeout"
    # Processes and clocks
    CRASH = "crash", "a command is killed between any two steps"
    PAUSE = "pause", "a command is paused for up to ten minutes"
    AGENT_CRASH = "agent-crash", "an agent is killed between any two steps and restarted"
    AGENT_PAUSE = "agent-pause", "an agent is paused for up to five minutes"
    CLOCK_SKEW = "clock-skew", "wall clocks are off by up to 30 s"
    # Machines
    SPOT_NOTICE = "spot-notice", "a machine gets a spot notice and is terminated two minutes later"
    POWER_CUT = "power-cut", "a machine stops without notice"
    NEVER_BOOTS = "never-boots", "a machine is launched but nothing on it starts, not even its dead-man timer"
    SCRIPT_FAILED = "script-failed", "the pre-runner script fails"
    REGISTRATION_FAILED = "registration-failed", "the runner cannot be configured"
    RESET_FAILED = "reset-failed", "the machine cannot be reset"
    LISTENER_DIES = "listener-dies", "the runner's listener exits by itself, or GitHub sends it away"
    # Users and operators
    CANCEL = "cancel", "a provision is cancelled"
    RERUN = "rerun", "a run is re-run under the same run id while its first attempt is cleaned up"
    RELEASE_EARLY = "release-early", "a run is released while it is provisioned, or while its jobs run"
    RELEASE_TWICE = "release-twice", "a run is released twice at the same time"
    RELEASE_NEVER = "release-never", "a run is never released"
    RUN_UNRELEASED = "run-unreleased", "GitHub calls a run ended whose workflow does not release it"
    REFRESH_TWICE = "refresh-twice", "two refreshes run at the same time"
    CONFIG_CHANGE = "config-change", "the configuration is changed while commands run"
    DRAIN = "drain", "an operator drains an instance in any state"
    QUARANTINE = "quarantine", "an operator puts an instance into quarantine"
    TERMINATE = "terminate", "an operator terminates an instance, even if it runs a job"
    # Runner sets, in worlds with demand only
    LISTENER_CRASH = "listener-crash", "the listener is killed between any two steps and restarted"
    LISTENER_PAUSE = "listener-pause", "the listener is paused, for longer than its lease or shortly"
    LISTENER_RESTART = "listener-restart", "the listener is stopped in an orderly way and restarted"
    SESSION_CONFLICT = "session-conflict", "GitHub refuses a session although none is open"
    SESSION_LOST = "session-lost", "a message session ends although it is used"
    DEMAND_FAILED = "demand-failed", "a call to the Actions service fails, applied or not, or its token expires"
    DEMAND_HANGS = "demand-hangs", "a call to the Actions service hangs for up to five minutes"
    EVENT_LOST = "event-lost", "GitHub never sends an event of a job"
    EVENT_LATE = "event-late", "GitHub sends an event of a job up to three minutes late"
    EVENT_TWICE = "event-twice", "GitHub sends an acknowledged message again"
    COMPLETED_EARLY = "completed-early", "GitHub says that a job has ended which still runs"
    STATISTICS_HIGH = "statistics-high", "GitHub counts too many assigned jobs for some minutes"
    STATISTICS_LOW = "statistics-low", "GitHub counts too few assigned jobs for some minutes"
    ASSIGNMENT_LAPSES = "assignment-lapses", "the assignment of a job lapses after some seconds"
    JIT_UNSURE = "jit-unsure", "GitHub registers a runner and its answer is lost"
    REGISTRATION_GONE = "registration-gone", "GitHub removes the registration of an idle runner"
    NEVER_REGISTERS = "never-registers", "a machine boots, and its agent hangs before the runner listens"
    SET_DELETED = "set-deleted", "GitHub deletes a scale set"

    @property
    def needs_demand(self) -> bool:
        return self in _DEMAND


_DEMAND = frozenset(list(Fault)[list(Fault).index(Fault.LISTENER_CRASH) :])
#: Faults that end or disturb machines, agents and the work of people, and leave a listener what it knows.
OF_MACHINES = frozenset(
    {
        Fault.CLOCK_SKEW,
        Fault.SPOT_NOTICE,
        Fault.POWER_CUT,
        Fault.NEVER_BOOTS,
        Fault.SCRIPT_FAILED,
        Fault.REGISTRATION_FAILED,
        Fault.RESET_FAILED,
        Fault.LISTENER_DIES,
        Fault.NEVER_REGISTERS,
        Fault.AGENT_CRASH,
        Fault.AGENT_PAUSE,
        Fault.NO_CAPACITY,
        Fault.CANCEL,
        Fault.RERUN,
        Fault.RELEASE_EARLY,
        Fault.RELEASE_TWICE,
        Fault.RELEASE_NEVER,
        Fault.RUN_UNRELEASED,
        Fault.REFRESH_TWICE,
        Fault.DRAIN,
        Fault.QUARANTINE,
        Fault.TERMINATE,
    }
)
#: Faults that are drawn separately, so that the other draws of a seed do not depend on them.
SEPARATE = (Fault.BATCH_SPLIT, Fault.DESCRIBE_PARTIAL, Fault.LIST_MOVES, Fault.GITHUB_HANGS)
#: Faults that are never drawn, only named: the sweeps of such worlds ask GitHub about runs, which changes all draws.
NAMED = (Fault.RUN_UNRELEASED,)
#: Probability that `Swarm.FEW` adds one of these to the others.
_ADDED = 0.3

#: Maximum error of a wall clock in seconds.
MAX_SKEW_S = 30.0
#: Maximum age in seconds of what a search of records, a list of EC2 machines and a list of GitHub runners show. The EC2
#: value must stay below `gone_after_s`.
MAX_INDEX_LAG_S = 20.0
MAX_DESCRIBE_LAG_S = 40.0
MAX_LIST_LAG_S = 60.0
#: Timeout in seconds of a call to GitHub.
GITHUB_TIMEOUT_S = 10.0

#: Maximum number of faults that `Swarm.FEW` enables, besides one that is drawn separately.
FEW = 6


class Swarm(StrEnum):
    """Swarm testing: each seed enables its own random selection of faults.

    With half of the faults, most pairs of faults occur together in some seed. With few faults, instances live long
    enough for bugs that need a long history before one fault.
    """

    HALF = "swarm"
    FEW = "few"


FaultChoice = frozenset[Fault] | Swarm


def parse_faults(text: str) -> FaultChoice:
    """Parse `swarm`, `few`, `all`, `none`, or comma-separated names of faults."""
    if text in set(Swarm):
        return Swarm(text)
    if text in {"all", "none"}:
        return frozenset(Fault) if text == "all" else frozenset()
    names = [name.strip() for name in text.split(",") if name.strip()]
    known = {fault.value for fault in Fault}
    for name in names:
        if name not in known:
            raise UserError(
                f"unknown fault {name!r}",
                field="--faults",
                fix=f"use swarm, few, all, none, or some of {', '.join(sorted(known))}",
            )
    if not names:
        raise UserError("--faults is empty", field="--faults", fix="use swarm, few, all, none, or names of faults")
    return frozenset(Fault(name) for name in names)


def format_faults(faults: FaultChoice) -> str:
    """The inverse of `parse_faults`."""
    if isinstance(faults, Swarm):
        return faults.value
    if faults == frozenset(Fault):
        return "all"
    return ",".join(sorted(faults)) or "none"


def draw_half(rng: random.Random, *, demand: bool = False) -> frozenset[Fault]:
    """Half of the faults that need demand, or half of the others."""
    faults = [fault for fault in Fault if fault.needs_demand is demand and fault not in (*SEPARATE, *NAMED)]
    return frozenset(rng.sample(faults, len(faults) // 2))


def draw_separate(rng: random.Random) -> frozenset[Fault]:
    """Half of the faults that are drawn separately."""
    return frozenset(rng.sample(SEPARATE, len(SEPARATE) // 2))


def draw_few(rng: random.Random, *, demand: bool = False) -> frozenset[Fault]:
    faults = [fault for fault in Fault if (demand or not fault.needs_demand) and fault not in (*SEPARATE, *NAMED)]
    drawn = rng.sample(faults, rng.randint(1, FEW))
    return frozenset([*drawn, rng.choice(SEPARATE)] if rng.random() < _ADDED else drawn)


@dataclass(frozen=True, kw_only=True, slots=True)
class InjectedFault:
    """One injected fault: its name and its number among the faults of that name. The shrinker suppresses some."""

    fault: Fault
    number: int

    def __str__(self) -> str:
        return f"{self.fault}#{self.number}"


class FaultInjector:
    """Decides where faults are injected and records them."""

    def __init__(
        self,
        *,
        enabled: frozenset[Fault],
        rng: random.Random,
        suppressed: Collection[InjectedFault] = (),
        trace: Callable[[str], None],
        now: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._now = now
        self.enabled = enabled
        #: Set to False when the faults of a world end.
        self.active = True
        self.rng = rng
        #: Factor for all probabilities, different per world.
        self._harshness = rng.choice((0.3, 1.0, 1.0, 2.5))
        self._suppressed = frozenset(suppressed)
        self._trace = trace
        self._drawn: Counter[Fault] = Counter()
        self.counts: Counter[Fault] = Counter()
        #: Time of the last fault, and of the last one that affected each instance.
        self.last_at = -1e9
        self.affected_at: dict[str, float] = {}
        #: Time of the last fault of each kind.
        self.last_of: dict[Fault, float] = {}
        self.injected: list[InjectedFault] = []

    def inject(self, fault: Fault, probability: float, subjects: Iterable[str] = ()) -> bool:
        """Return whether the fault occurs now, and record it. `subjects` are the instances that it affects."""
        if fault not in self.enabled or not self.active or self.rng.random() >= probability * self._harshness:
            return False
        return self.record(fault, subjects)

    def record(self, fault: Fault, subjects: Iterable[str] = ()) -> bool:
        """Record a fault that occurs now. Return False if the plan suppresses it."""
        subjects = list(subjects)
        self._drawn[fault] += 1
        injected = InjectedFault(fault=fault, number=self._drawn[fault])
        if injected in self._suppressed:
            return False
        self.counts[fault] += 1
        self.injected.append(injected)
        self.last_of[fault] = self._now()
        if fault is not Fault.CLOCK_SKEW:
            self.last_at = self._now()
            self.affected_at.update(dict.fromkeys(subjects, self.last_at))
            self._trace(f"fault {injected} {' '.join(subjects)}".rstrip())
        return True


#: Number of lines that are hashed together.
CHUNK = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceLine:
    at: float
    source: str
    text: str

    def __str__(self) -> str:
        return f"{self.at:9.3f}  {self.source:<18} {self.text}"


class Trace:
    def __init__(self, now: Callable[[], float], *, keep: bool = False) -> None:
        self._now = now
        self._hash = hashlib.blake2b(digest_size=16)
        self._unhashed: list[str] = []
        self._keep = keep
        self.lines: list[TraceLine] = []

    def add(self, source: str, text: str) -> None:
        at = self._now()
        self._unhashed.append(f"{at!r} {source} {text}\n")
        if len(self._unhashed) >= CHUNK:
            self._update_hash()
        if self._keep:
            self.lines.append(TraceLine(at=at, source=source, text=text))

    @property
    def digest(self) -> str:
        self._update_hash()
        return self._hash.hexdigest()

    def _update_hash(self) -> None:
        self._hash.update("".join(self._unhashed).encode())
        self._unhashed.clear()
