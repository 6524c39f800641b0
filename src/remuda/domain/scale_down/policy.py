"""The policy of scale-down, part of the settings."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import TYPE_CHECKING

from remuda.domain.scale_down.idle_config import IdleWindow

if TYPE_CHECKING:
    from remuda.domain.scale_down.fleet import FleetMachine

#: Default minutes after its launch in which a runner is not removed, by operating system.
MINIMUM_MIN = {"linux": 5.0, "windows": 15.0}
#: Default minutes after its launch in which a machine may lack a registration.
BOOT_MIN = 5.0


class IdleScope(StrEnum):
    """Scope of an idle quota."""

    ENVIRONMENT = "environment"
    OWNER = "owner"


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaleDownPolicy:
    windows: tuple[IdleWindow, ...] = ()
    #: Minutes after the launch in which a runner is not removed. None: the default of its operating system.
    minimum_min: float | None = None
    boot_min: float = BOOT_MIN
    idle_scope: IdleScope = IdleScope.ENVIRONMENT
    #: Maximum registrations removed per cycle; None for no limit.
    max_removals: int | None = None

    def minimum(self, machine: FleetMachine) -> timedelta:
        minutes = MINIMUM_MIN[machine.os] if self.minimum_min is None else self.minimum_min
        return timedelta(minutes=minutes)

    @property
    def boot(self) -> timedelta:
        return timedelta(minutes=self.boot_min)
