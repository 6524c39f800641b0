"""What a cycle of scale-down decided and did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from remuda.domain.scale_down.decisions import Action, Decision, ScaleDownPhase
from remuda.domain.scale_down.idle_config import Quota
from remuda.ports.event_log import EventLog

#: These change nothing: once decided, they are carried out.
_PASSIVE = frozenset({Action.KEEP, Action.SKIP})


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    decision: Decision
    done: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaleDownResult:
    environment: str
    dry_run: bool
    quota: Quota
    outcomes: tuple[Outcome, ...]
    errors: tuple[str, ...]
    seconds: float
    calls: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    def of(self, action: Action) -> tuple[Outcome, ...]:
        return tuple(item for item in self.outcomes if item.decision.action is action)


class Tally:
    """Collects as the cycle goes. A machine has one decision in each phase: the last word counts."""

    def __init__(self, event_log: EventLog, *, dry_run: bool = False) -> None:
        self._event_log = event_log
        self._prefix = "would" if dry_run else "scale"
        self._outcomes: dict[tuple[ScaleDownPhase, str], Outcome] = {}
        self.errors: list[str] = []

    def error(self, what: str) -> None:
        self.errors.append(what)
        self._event_log.record("scale-down-failed", what)

    def add(self, decision: Decision, *, done: bool | None = None) -> None:
        """Without `done`: passive ones are carried out by being made."""
        carried_out = decision.action in _PASSIVE if done is None else done
        self._outcomes[decision.phase, decision.instance_id] = Outcome(decision=decision, done=carried_out)
        self._event_log.record(
            f"{self._prefix}-{decision.action}",
            decision.reason,
            instance_id=decision.instance_id,
            owner=decision.owner,
            phase=decision.phase.value,
            done=carried_out,
        )

    def explain(self, decision: Decision) -> None:
        """A better reason for what is kept; a machine that no list showed gets its decision now."""
        known = self._outcomes.get((decision.phase, decision.instance_id))
        kept = decision if known is None else replace(known.decision, reason=decision.reason)
        self._outcomes[decision.phase, decision.instance_id] = Outcome(decision=kept, done=True)
        self._event_log.record(f"{self._prefix}-renew", kept.reason, instance_id=kept.instance_id, owner=kept.owner)

    def outcomes(self) -> tuple[Outcome, ...]:
        return tuple(sorted(self._outcomes.values(), key=lambda item: item.decision.phase.value))
