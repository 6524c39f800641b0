"""What the local backend takes at launch, and the types of machine it plays."""

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
    #: How long a machine is pending: to show cold starts against warm ones.
    boot_delay_s: float = 0.0
    script: str = ""
    #: How many machines may live under the root at once.
    capacity: int | None = None
    #: The machine gets power, but its agent never comes.
    never_boots: bool = False
    #: Power loss so long after the boot.
    dies_after_s: float | None = None
    no_capacity: bool = False
    #: A launch gets no more than this.
    partial: int | None = None

    @classmethod
    def parse(cls, launch: Mapping[str, str]) -> LocalOptions:
        for name in launch:
            if name not in NAMES:
                raise UserError(
                    f"the local backend has no launch option {name!r}", field=name, fix=f"use {', '.join(NAMES)}"
                )
        script = launch.get(SCRIPT, "")
        if len(script) > MAX_SCRIPT_CHARS or "\0" in script:
            raise UserError(
                f"{SCRIPT} is no text of at most {MAX_SCRIPT_CHARS} characters",
                field=SCRIPT,
                fix="let the script fetch what is large",
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
        raise UserError(f"{FAULT} is {fault[:80]!r}", field=FAULT, fix=f"give {FAULTS}")


def _seconds(text: str, field: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= MAX_SECONDS:
        raise UserError(f"{field}: {text[:80]!r} is no time", field=field, fix=f"give 0 to {MAX_SECONDS:g} seconds")
    return value


def _count(text: str, field: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 9 and int(text) <= MAX_MACHINES):
        raise UserError(
            f"{field}: {text[:80]!r} is no number of machines", field=field, fix=f"give 0 to {MAX_MACHINES}"
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
#: Family and GiB for each vCPU.
_FAMILIES = (("c6i", 2), ("m6i", 4), ("r6i", 8), ("c7g", 2))
#: Small ones first: the first that fits is the cheapest.
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
        fix="allow more types: the local backend plays c6i, m6i, r6i and c7g, from large to 16xlarge",
    )
