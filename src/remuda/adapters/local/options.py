"""Launch options of the local backend, and the machine types that it simulates."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from remuda.domain.errors import CapacityError, UserError
from remuda.domain.resources import RunnerRequest

BOOT_DELAY = "boot-delay-s"
SCRIPT = "pre-runner-script"
FAULT = "fault"
CAPACITY = "capacity"
NAMES = (BOOT_DELAY, SCRIPT, FAULT, CAPACITY)

MAX_SECONDS = 86_400.0
MAX_MACHINES = 10_000
MAX_SCRIPT_CHARS = 256 * 1024
FAULTS = "never-boots, dies-after-s=SECONDS, no-capacity or partial=COUNT"


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalOptions:
    #: Seconds that a machine stays pending, to simulate a cold start.
    boot_delay_s: float = 0.0
    script: str = ""
    #: Maximum number of machines at the same time, or None for no limit.
    capacity: int | None = None
    #: Fault: the supervisor starts, but no agent.
    never_boots: bool = False
    #: Fault: seconds from the boot to a power loss.
    dies_after_s: float | None = None
    #: Fault: every launch fails for lack of capacity.
    no_capacity: bool = False
    #: Fault: maximum number of machines per launch.
    partial: int | None = None

    @classmethod
    def parse(cls, launch: Mapping[str, str]) -> LocalOptions:
        for name in launch:
            if name not in NAMES:
                raise UserError(
                    f"unknown launch option {name!r} for the local backend", field=name, fix=f"use {', '.join(NAMES)}"
                )
        script = launch.get(SCRIPT, "")
        if len(script) > MAX_SCRIPT_CHARS or "\0" in script:
            raise UserError(
                f"{SCRIPT} is longer than {MAX_SCRIPT_CHARS} characters or contains a NUL",
                field=SCRIPT,
                fix="shorten the script, for example by downloading large parts",
            )
        fault, _, number = launch.get(FAULT, "").partition("=")
        _check_fault(fault, number)
        return cls(
            boot_delay_s=_seconds(launch[BOOT_DELAY], BOOT_DELAY) if BOOT_DELAY in launch else 0.0,
            script=script,
            capacity=_count(launch[CAPACITY], CAPACITY) if CAPACITY in launch else None,
            never_boots=fault == "never-boots",
            dies_after_s=_seconds(number, FAULT) if fault == "dies-after-s" else None,
            no_capacity=fault == "no-capacity",
            partial=_count(number, FAULT) if fault == "partial" else None,
        )


def _check_fault(fault: str, number: str) -> None:
    plain = fault in {"", "never-boots", "no-capacity"} and not number
    if not plain and fault not in {"dies-after-s", "partial"}:
        raise UserError(f"unknown {FAULT} {fault[:80]!r}", field=FAULT, fix=f"use {FAULTS}")


def _seconds(text: str, field: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= MAX_SECONDS:
        raise UserError(
            f"{field} must be a number of seconds from 0 to {MAX_SECONDS:g}, got {text[:80]!r}",
            field=field,
            fix=f"give a number from 0 to {MAX_SECONDS:g}",
        )
    return value


def _count(text: str, field: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 9 and int(text) <= MAX_MACHINES):
        raise UserError(
            f"{field} must be an integer from 0 to {MAX_MACHINES}, got {text[:80]!r}",
            field=field,
            fix=f"give an integer from 0 to {MAX_MACHINES}",
        )
    return int(text)


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalMachineType:
    name: str
    cpu: int
    #: MiB.
    memory_mib: int


_SIZES = (
    ("large", 2),
    ("xlarge", 4),
    ("2xlarge", 8),
    ("4xlarge", 16),
    ("8xlarge", 32),
    ("12xlarge", 48),
    ("16xlarge", 64),
)
#: Family, and GiB per vCPU.
_FAMILIES = (("c6i", 2), ("m6i", 4), ("r6i", 8), ("c7g", 2))
#: Ordered by size: the first match is the cheapest.
CATALOGUE = tuple(
    LocalMachineType(name=f"{family}.{size}", cpu=cpu, memory_mib=cpu * gib * 1024)
    for size, cpu in _SIZES
    for family, gib in _FAMILIES
)


def choose_type(request: RunnerRequest) -> LocalMachineType:
    wanted = request.resource_class
    for candidate in CATALOGUE:
        if (
            candidate.cpu >= wanted.cpu
            and candidate.memory_mib >= wanted.memory_mib
            and request.patterns.matches(candidate.name)
        ):
            return candidate
    raise CapacityError(
        f"no local machine type matches {request.patterns} with the {wanted.cpu} cpu and {wanted.memory_mib} MiB "
        f"of class {wanted.name}",
        fix="allow more types: the local backend offers c6i, m6i, r6i and c7g, from large to 16xlarge",
    )
