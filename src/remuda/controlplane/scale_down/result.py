"""The result of a scale-down cycle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from remuda.domain.scale_down.decisions import Action, Decision, ScaleDownPhase
from remuda.domain.scale_down.idle_config import Quota
from remuda.ports.event_log import EventLog

#: Actions that change nothing, so that the decision itself carries them out.
_PASSIVE = frozenset({Action.KEEP, Action.SKIP})


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaleDownOutcome:
    decision: Decision
    done: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaleDownResult:
    environment: str
    dry_run: bool
    quota: Quota
    outcomes: tuple[ScaleDownOutcome, ...]
    errors: tuple[str, ...]
    seconds: float
    calls: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    def of(self, action: Action) -> tuple[ScaleDownOutcome, ...]:
        return tuple(item for item in self.outcomes if item.decision.action is action)


class ScaleDownResultBuilder:
    """Collects outcomes and errors during a cycle. The last decision per machine and phase counts."""

    def __init__(self, event_log: EventLog, *, dry_run: bool = False) -> None:
        self._event_log = event_log
        self._prefix = "would" if dry_run else "scale"
        self._outcomes: dict[tuple[ScaleDownPhase, str], ScaleDownOutcome] = {}
        self.errors: list[str] = []

    def error(self, message: str) -> None:
        self.errors.append(message)
        self._event_log.record("scale-down-failed", message)

    def add(self, decision: Decision, *, done: bool | None = None) -> None:
        """Without `done`, only decisions to keep or skip a machine count as done."""
        is_done = decision.action in _PASSIVE if done is None else done
        self._outcomes[decision.phase, decision.instance_id] = ScaleDownOutcome(decision=decision, done=is_done)
        self._event_log.record(
            f"{self._prefix}-{decision.action}",
            decision.reason,
            instance_id=decision.instance_id,
            owner=decision.owner,
            phase=decision.phase.value,
            done=is_done,
        )

    def set_keep_reason(self, decision: Decision) -> None:
        """Replace the reason of a kept machine, or add the decision if no list contained the machine."""
        known = self._outcomes.get((decision.phase, decision.instance_id))
        kept = decision if known is None else replace(known.decision, reason=decision.reason)
        self._outcomes[decision.phase, decision.instance_id] = ScaleDownOutcome(decision=kept, done=True)
        self._event_log.record(f"{self._prefix}-renew", kept.reason, instance_id=kept.instance_id, owner=kept.owner)

    def outcomes(self) -> tuple[ScaleDownOutcome, ...]:
        return tuple(sorted(self._outcomes.values(), key=lambda item: item.decision.phase.value))
