"""The transition table: one row per conditional write. The state diagram in the docs is generated from it."""

from __future__ import annotations

from dataclasses import dataclass

from remuda.domain.instance import RETIREMENTS, Actor, RetireReason, State


@dataclass(frozen=True, kw_only=True, slots=True)
class Transition:
    """One row of the table."""

    name: str
    #: None stands for "no record".
    sources: frozenset[State | None]
    #: None if the transition keeps the state.
    target: State | None
    by: tuple[Actor, ...]
    when: str
    effect: str
    #: Reasons that a row to `terminating` accepts.
    reasons: frozenset[RetireReason] = frozenset()


def _row(  # noqa: PLR0917 - table rows read best by position
    name: str,
    sources: tuple[State | None, ...],
    target: State | None,
    by: tuple[Actor, ...],
    when: str,
    effect: str,
    reasons: tuple[RetireReason, ...] = (),
) -> Transition:
    return Transition(
        name=name,
        sources=frozenset(sources),
        target=target,
        by=by,
        when=when,
        effect=effect,
        reasons=frozenset(reasons),
    )


_P, _L, _R, _S = Actor.PROVISION, Actor.RELEASE, Actor.REFRESH, Actor.SCALE_DOWN
_O = Actor.OPERATOR
_ENDED = "run and assignment cleared; threshold = now"
#: Reasons that every live state accepts.
_ALWAYS = (RetireReason.EXPIRED, RetireReason.GONE, RetireReason.TERMINATED_BY_OPERATOR)
_SERVING = (State.CREATED, State.CLAIMED, State.RUNNING, State.RELEASING, State.IDLE)

TRANSITIONS: tuple[Transition, ...] = (
    _row(
        "create",
        (None,),
        State.CREATED,
        (_P,),
        "no record",
        "epoch 1; threshold = provision deadline; retired from the start if it serves a single run",
    ),
    _row(
        "tombstone",
        (None,),
        State.TERMINATING,
        (_P, _R),
        "EC2 instance with the pool's tags and no record after a grace period, or rolled back",
        "locked",
        (RetireReason.UNRECORDED,),
    ),
    _row(
        "claim",
        (State.IDLE,),
        State.CLAIMED,
        (_P,),
        "message's epoch; tier and repository fit the pool's reuse policy; not retired",
        "epoch + 1; run, owner, assignment; tier may fall, never rise; threshold = provision deadline",
    ),
    _row(
        "commit",
        (State.CREATED, State.CLAIMED),
        State.RUNNING,
        (_P,),
        "UD_REG_OK of this epoch, by its owner",
        "threshold = now + max runtime; registration credential removed",
    ),
    _row(
        "release",
        (State.CLAIMED, State.RUNNING),
        State.RELEASING,
        (_P, _L, _R),
        "provision released or failed",
        "run cleared; threshold = now + release time; removal credential added",
    ),
    _row(
        "extend",
        (State.RELEASING,),
        None,
        (_L, _R),
        "the agent reports a running job",
        "threshold = now + an extension, at most the run's deadline",
    ),
    _row(
        "credential",
        (State.RELEASING,),
        None,
        (_L, _R),
        "the credential expires before the threshold",
        "credential only",
    ),
    _row(
        "pool",
        (State.RELEASING,),
        State.IDLE,
        (_L, _R),
        "UD_REMOVE_REG_REMOVE_RUN_OK of this epoch, not retired",
        "credential removed; uses + 1; threshold = now + idle time",
    ),
    _row("announce", (State.IDLE,), None, (_L, _R), "never announced, or long ago", "announced at = now"),
    _row("renew", (State.IDLE,), None, (_S,), "within the idle quota and the maximum age", "threshold only"),
    _row("retire", _SERVING, None, (_L, _R, _O), "spot notice, or drained", "not pooled again"),
    _row(
        "quarantine",
        _SERVING,
        None,
        (_O,),
        "ordered by an operator",
        "not claimed again; kept until a limit, by its threshold once it is idle or releasing",
    ),
    _row(
        "end-created",
        (State.CREATED,),
        State.TERMINATING,
        (_P, _L, _R, _O),
        "failed, timed out, released, expired, gone from EC2, ordered by an operator",
        _ENDED,
        (RetireReason.FAILED, RetireReason.TIMED_OUT, RetireReason.RELEASED, *_ALWAYS),
    ),
    _row(
        "end-claimed",
        (State.CLAIMED,),
        State.TERMINATING,
        (_P, _R, _O),
        "failed signal, owner's timeout, expired, gone, ordered by an operator",
        _ENDED,
        (RetireReason.FAILED, RetireReason.TIMED_OUT, *_ALWAYS),
    ),
    _row(
        "end-running",
        (State.RUNNING,),
        State.TERMINATING,
        (_R, _O),
        "expired, UD_REG_FAILED of this epoch, gone, ordered by an operator",
        _ENDED,
        (RetireReason.FAILED, *_ALWAYS),
    ),
    _row(
        "end-releasing",
        (State.RELEASING,),
        State.TERMINATING,
        (_L, _R, _O),
        "UD_REMOVE_*_FAILED of this epoch; OK of this epoch and retired; expired; gone; ordered by an operator",
        _ENDED,
        (RetireReason.FAILED, *_ALWAYS, *RETIREMENTS),
    ),
    _row(
        "end-idle",
        (State.IDLE,),
        State.TERMINATING,
        (_R, _O),
        "expired, too old, too many uses, spot notice, reuse is never, gone, ordered by an operator",
        _ENDED,
        (*_ALWAYS, *RETIREMENTS),
    ),
    _row("confirm", (State.TERMINATING,), State.TERMINATED, (_R,), "EC2 confirmed", "kept for reports, then deleted"),
)

ROWS_BY_NAME = {row.name: row for row in TRANSITIONS}
#: The row to `terminating` per live state.
END_ROWS = {
    source: row
    for row in TRANSITIONS
    if row.target is State.TERMINATING
    for source in row.sources
    if source is not None
}
