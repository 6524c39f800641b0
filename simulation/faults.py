"""What may go wrong, each by a name that can be switched on and off; how often it did, and to what."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum

from remuda.domain.errors import UserError

NO_RECORD = "none"


class Fault(StrEnum):
    # Store
    WRITE_LOST = "write-lost"
    WRITE_UNSURE = "write-unsure"
    READ_FAILED = "read-failed"
    THROTTLED = "throttled"
    STALE_INDEX = "stale-index"
    SHORT_PAGES = "short-pages"
    SLOW_CALL = "slow-call"
    # Pool
    MESSAGE_LOST = "message-lost"
    MESSAGE_TWICE = "message-twice"
    MESSAGE_LATE = "message-late"
    MESSAGE_REORDERED = "message-reordered"
    MESSAGE_MALFORMED = "message-malformed"
    RECEIVE_SHORT = "receive-short"
    DELETE_LOST = "delete-lost"
    POOL_FAILED = "pool-failed"
    # Compute
    FLEET_PARTIAL = "fleet-partial"
    LAUNCH_UNSURE = "launch-unsure"
    NO_CAPACITY = "no-capacity"
    DESCRIBE_LAGS = "describe-lags"
    COMPUTE_FAILED = "compute-failed"
    # GitHub
    LIST_OLD = "list-old"
    BUSY_WRONG = "busy-wrong"
    GITHUB_401 = "github-401"
    GITHUB_403 = "github-403"
    GITHUB_404 = "github-404"
    GITHUB_422 = "github-422"
    GITHUB_429 = "github-429"
    GITHUB_5XX = "github-5xx"
    GITHUB_UNSURE = "github-unsure"
    # Processes and clocks
    CRASH = "crash"
    PAUSE = "pause"
    AGENT_CRASH = "agent-crash"
    AGENT_PAUSE = "agent-pause"
    CLOCK_SKEW = "clock-skew"
    # Machines
    SPOT_NOTICE = "spot-notice"
    POWER_CUT = "power-cut"
    NEVER_BOOTS = "never-boots"
    SCRIPT_FAILED = "script-failed"
    REGISTRATION_FAILED = "registration-failed"
    RESET_FAILED = "reset-failed"
    LISTENER_DIES = "listener-dies"
    # People
    CANCEL = "cancel"
    RERUN = "rerun"
    RELEASE_EARLY = "release-early"
    RELEASE_TWICE = "release-twice"
    RELEASE_NEVER = "release-never"
    REFRESH_TWICE = "refresh-twice"
    CONFIG_CHANGE = "config-change"
    DRAIN = "drain"
    QUARANTINE = "quarantine"
    TERMINATE = "terminate"


MEANING: dict[Fault, str] = {
    Fault.WRITE_LOST: "a write fails and was not applied",
    Fault.WRITE_UNSURE: "a write is applied and reported as failed",
    Fault.READ_FAILED: "a read fails",
    Fault.THROTTLED: "for some seconds most calls to the store are throttled",
    Fault.STALE_INDEX: "a search shows records as they were up to 20 s ago",
    Fault.SHORT_PAGES: "a list comes in pages of 1 to 5, with time between them",
    Fault.SLOW_CALL: "a call or its answer takes up to 25 s",
    Fault.MESSAGE_LOST: "a message that was sent never arrives",
    Fault.MESSAGE_TWICE: "a message arrives twice, or comes back before its time",
    Fault.MESSAGE_LATE: "a message arrives up to a minute late",
    Fault.MESSAGE_REORDERED: "a message is overtaken by later ones",
    Fault.MESSAGE_MALFORMED: "somebody writes something else to a queue",
    Fault.RECEIVE_SHORT: "a receive returns fewer messages than there are, or none",
    Fault.DELETE_LOST: "a deleted message comes back",
    Fault.POOL_FAILED: "a call to the queue fails, done or not",
    Fault.FLEET_PARTIAL: "a fleet launches fewer than asked for",
    Fault.LAUNCH_UNSURE: "a launch happens and its answer is lost",
    Fault.NO_CAPACITY: "a launch is refused for capacity",
    Fault.DESCRIBE_LAGS: "EC2 shows machines as they were up to 40 s ago",
    Fault.COMPUTE_FAILED: "a call to EC2 fails, done or not",
    Fault.LIST_OLD: "GitHub lists runners as they were up to a minute ago",
    Fault.BUSY_WRONG: "GitHub's busy flag is wrong",
    Fault.GITHUB_401: "GitHub refuses a good credential",
    Fault.GITHUB_403: "GitHub refuses a permission",
    Fault.GITHUB_404: "GitHub does not find what is there",
    Fault.GITHUB_422: "GitHub says that a runner is busy, or a request invalid",
    Fault.GITHUB_429: "GitHub limits the rate",
    Fault.GITHUB_5XX: "GitHub fails",
    Fault.GITHUB_UNSURE: "GitHub does it and its answer is lost",
    Fault.CRASH: "a command is killed between any two steps",
    Fault.PAUSE: "a command stands still for up to ten minutes",
    Fault.AGENT_CRASH: "an agent is killed between any two steps, and started again",
    Fault.AGENT_PAUSE: "an agent stands still for up to five minutes",
    Fault.CLOCK_SKEW: "wall clocks are off by up to 30 s",
    Fault.SPOT_NOTICE: "a machine is announced to be taken, and taken two minutes later",
    Fault.POWER_CUT: "a machine is gone without a word",
    Fault.NEVER_BOOTS: "a machine is launched and nothing on it ever starts, not even its dead-man timer",
    Fault.SCRIPT_FAILED: "the pre-runner script fails",
    Fault.REGISTRATION_FAILED: "the runner cannot be configured",
    Fault.RESET_FAILED: "the machine cannot be reset",
    Fault.LISTENER_DIES: "the runner's listener ends by itself",
    Fault.CANCEL: "a provision is interrupted",
    Fault.RERUN: "a run is run again under the same run id while its first attempt is cleaned up",
    Fault.RELEASE_EARLY: "a run is released while it is provisioned, or while its jobs run",
    Fault.RELEASE_TWICE: "a run is released twice at once",
    Fault.RELEASE_NEVER: "a run is never released",
    Fault.REFRESH_TWICE: "two refreshes run at once",
    Fault.CONFIG_CHANGE: "the configuration is changed in flight",
    Fault.DRAIN: "an operator drains an instance, whatever it does",
    Fault.QUARANTINE: "an operator puts an instance into quarantine",
    Fault.TERMINATE: "an operator ends an instance, jobs or not",
}

#: The largest error of a wall clock.
MAX_SKEW_S = 30.0
#: The oldest that lists may be. EC2's must stay below `gone_after_s`.
MAX_INDEX_LAG_S = 20.0
MAX_DESCRIBE_LAG_S = 40.0
MAX_LIST_LAG_S = 60.0


#: The most that a world with few faults has.
FEW = 6


class Swarm(StrEnum):
    """Each seed draws its faults. Half of them meet each other in most ways; of few, each has the time to matter."""

    HALF = "swarm"
    FEW = "few"


Chosen = frozenset[Fault] | Swarm


def parse_faults(text: str) -> Chosen:
    """`swarm` or `few`, `all`, `none`, or names with commas between."""
    if text in set(Swarm):
        return Swarm(text)
    if text in {"all", "none"}:
        return frozenset(Fault) if text == "all" else frozenset()
    names = [name.strip() for name in text.split(",") if name.strip()]
    known = {fault.value for fault in Fault}
    for name in names:
        if name not in known:
            raise UserError(
                f"faults: {name!r} is not a fault",
                field="--faults",
                fix=f"use swarm, few, all, none, or some of {', '.join(sorted(known))}",
            )
    if not names:
        raise UserError("faults is empty", field="--faults", fix="use swarm, few, all, none, or names of faults")
    return frozenset(Fault(name) for name in names)


def spelled(faults: Chosen) -> str:
    """As `parse_faults` reads it."""
    if isinstance(faults, Swarm):
        return faults.value
    if faults == frozenset(Fault):
        return "all"
    return ",".join(sorted(faults)) or "none"


def draw_half(chance: random.Random) -> frozenset[Fault]:
    faults = list(Fault)
    return frozenset(chance.sample(faults, len(faults) // 2))


def draw_few(chance: random.Random) -> frozenset[Fault]:
    return frozenset(chance.sample(list(Fault), chance.randint(1, FEW)))


@dataclass(frozen=True, kw_only=True, slots=True)
class InjectedFault:
    """One fault that happened: its name and its number among those of its kind. A shrunk run leaves some out."""

    fault: Fault
    number: int

    def __str__(self) -> str:
        return f"{self.fault}#{self.number}"


class Faults:
    def __init__(
        self,
        *,
        on: frozenset[Fault],
        chance: random.Random,
        spared: Collection[InjectedFault] = (),
        state_of: Callable[[str], str],
        tell: Callable[[str], None],
    ) -> None:
        self.on = on
        #: Off once the world is to come to rest.
        self.active = True
        self.chance = chance
        #: Some worlds are rougher than others.
        self._harshness = chance.choice((0.3, 1.0, 1.0, 2.5))
        self._spared = frozenset(spared)
        self._state_of = state_of
        self._tell = tell
        self._drawn: Counter[Fault] = Counter()
        self.counts: Counter[Fault] = Counter()
        self.coverage: Counter[tuple[Fault, str]] = Counter()
        self.strikes: list[InjectedFault] = []

    def strikes_now(self, fault: Fault, probability: float, subjects: Iterable[str] = ()) -> bool:
        """Whether a fault happens here, to these instances."""
        if fault not in self.on or not self.active or self.chance.random() >= probability * self._harshness:
            return False
        return self.happens(fault, subjects)

    def happens(self, fault: Fault, subjects: Iterable[str] = ()) -> bool:
        """Note a fault that happens now; False where this run spares it."""
        self._drawn[fault] += 1
        strike = InjectedFault(fault=fault, number=self._drawn[fault])
        if strike in self._spared:
            return False
        self.counts[fault] += 1
        self.strikes.append(strike)
        subjects = list(subjects)
        for subject in subjects:
            self.cover(fault, subject)
        if fault is not Fault.CLOCK_SKEW:
            self._tell(f"fault {strike} {' '.join(subjects)}".rstrip())
        return True

    def cover_all(self, fault: Fault, instance_ids: Iterable[str]) -> None:
        """These it concerned as well."""
        for instance_id in instance_ids:
            self.cover(fault, instance_id)

    def cover(self, fault: Fault, instance_id: str) -> None:
        self.coverage[fault, self._state_of(instance_id)] += 1
