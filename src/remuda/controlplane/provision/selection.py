"""Claim workers: claim idle instances from the pool, for runs and for runner sets, and wait for their registration."""

from __future__ import annotations

from remuda.controlplane.context import Context, apply_confirmed, transition
from remuda.controlplane.provision.outcome import OutcomeRecorder
from remuda.controlplane.provision.pickup import PickupManager
from remuda.controlplane.provision.plan import ProvisionPlan, raise_if_past_deadline
from remuda.controlplane.provision.registration import describe_failure, wait_for_registration
from remuda.controlplane.provision.rollback import AcquiredInstance, AcquiredInstances
from remuda.controlplane.signal_waiter import StopReason, WaitResult
from remuda.domain.errors import Conflict, Unavailable, Unreadable
from remuda.domain.instance import Instance, State
from remuda.domain.provision import ProvisionStatus, RejectionKind
from remuda.domain.resources import PoolMessage, normalize_repository
from remuda.domain.signals import Verdict
from remuda.domain.transitions import Actor, Claim, End, RetireReason, advance, presumed_idle
from remuda.ports.pool import Delivery

#: Seconds that a claimed instance has to register before the worker gives up on it.
REGISTRATION_TIMEOUT_S = 60.0
#: Failed registrations tolerated beyond the requested count. Without this limit, a fault on our side would consume the
#: whole pool.
EXTRA_FAILURES_ALLOWED = 3
#: Maximum age in seconds of the cached "provision is still open" check.
OPEN_CHECK_TTL_S = 1.0
#: Seconds between these checks while the workers only wait.
OPEN_CHECK_INTERVAL_S = 5.0


class Selection:
    """The claim workers of one provision. They share the count of failures and the check that it is still open."""

    def __init__(
        self,
        context: Context,
        plan: ProvisionPlan,
        pickup: PickupManager,
        acquired: AcquiredInstances,
        recorder: OutcomeRecorder,
    ) -> None:
        self._context = context
        self._plan = plan
        self._pickup = pickup
        self._acquired = acquired
        self._recorder = recorder
        self._failures = 0
        # The record was written just before.
        self._open_until = context.clock.monotonic() + OPEN_CHECK_TTL_S

    async def claim_one(self) -> AcquiredInstance | None:
        """Claim one matching instance and wait until it is registered. Return None if the pool is exhausted."""
        while (claimed := await self.claim()) is not None:
            registered = await self._wait_for_registration(claimed)
            if registered is not None:
                return registered
        return None

    async def claim(self) -> Instance | None:
        """Claim one matching instance. Return None if the pool is exhausted."""
        while True:
            raise_if_past_deadline(self._context, self._plan)
            delivery = await self._pickup.next_match()
            if delivery is None or delivery.message is None:
                return None
            await self._ensure_provision_open()
            claimed = await self._try_claim(delivery.message, delivery)
            if claimed is not None:
                return claimed
            # Another process was first: try the next message.

    async def claim_known(self, message: PoolMessage) -> Instance | None:
        """Claim an instance whose pool message was not received. Return None if another process was first."""
        return await self._try_claim(message)

    async def watch_provision_open(self) -> None:
        """Raise `Conflict` if the run is released while the workers wait for machines."""
        while True:
            await self._context.clock.sleep(OPEN_CHECK_INTERVAL_S)
            try:
                await self._ensure_provision_open()
            except Unavailable as error:
                self._context.event_log.record("read-failed", error.message, run_id=self._plan.provision.subject)

    async def _ensure_provision_open(self) -> None:
        """The check is cached for all workers; the commit rejects what it misses."""
        now = self._context.clock.monotonic()
        if self._plan.runner_set is not None or now < self._open_until:
            # Nobody releases a set's acquisition.
            return
        self._open_until = now + OPEN_CHECK_TTL_S
        ours = self._plan.provision
        current = await self._context.store.get_provision(ours.holder)
        if current is None or current.status is not ProvisionStatus.OPEN:
            raise Conflict(f"run {ours.run_id} was released while it was being provisioned", current=current)

    async def _try_claim(self, message: PoolMessage, delivery: Delivery | None = None) -> Instance | None:
        """Return the claimed instance, or None if another process was first or the record is unreadable."""
        context, plan = self._context, self._plan
        # After the last wait: the machine of a claim past the deadline expires at once.
        raise_if_past_deadline(context, plan)
        now = context.clock.now()
        idle = presumed_idle(message, now=now)
        change = advance(
            idle,
            Claim(
                holder=plan.provision.holder,
                claim=f"{plan.provision.provision_id}/{context.ids.new('w-')}",
                scope=plan.scope,
                tier=plan.request.tier,
                threshold=plan.provision.deadline,
                assignment=plan.assignment(message.id, message.epoch + 1),
                reuse=plan.request.reuse,
                repository=normalize_repository(plan.repository),
                margin_s=plan.config.lifetimes.margin_s,
            ),
            by=plan.actor,
            now=now,
            why=_claim_reason(message, plan),
        )
        # Track the instance before the write: if the call is cancelled, the write may still have been applied.
        expected = change.applied_to(idle)
        self._acquired.add(expected)
        try:
            claimed = await apply_confirmed(context, change)
        except Conflict as conflict:
            self._acquired.remove(expected)
            why = _claim_lost_reason(conflict.current, message)
            self._recorder.reject(RejectionKind.CLAIM_LOST, why, message.id)
            if delivery is not None and _is_still_idle(conflict.current, message):
                self._pickup.hand_back(delivery)
            elif delivery is not None:
                self._pickup.mark_used(delivery)
            context.event_log.record("claim-lost", why, instance_id=message.id, run_id=plan.provision.subject)
            return None
        except Unreadable as error:
            # The message stays in the pool: it is valid again after somebody repaired the record.
            self._acquired.remove(expected)
            if delivery is not None:
                self._pickup.hand_back(delivery)
            self._recorder.reject(RejectionKind.UNREADABLE, error.message, message.id)
            context.event_log.record("claim-failed", error.message, instance_id=message.id)
            return None
        self._acquired.add(claimed)
        if delivery is not None:
            self._pickup.mark_used(delivery)
        context.event_log.record(
            "claim-won",
            change.entry.why,
            instance_id=claimed.instance_id,
            run_id=claimed.subject,
            epoch=claimed.epoch,
        )
        return claimed

    async def _wait_for_registration(self, claimed: Instance) -> AcquiredInstance | None:
        """Return None, and terminate the instance, if it did not register."""
        timeout_at = self._context.clock.monotonic() + REGISTRATION_TIMEOUT_S
        waited = await wait_for_registration(self._context, claimed, until=min(self._plan.until, timeout_at))
        if waited.verdict is Verdict.OK:
            return self._acquired.register(claimed, waited.report)
        if waited.stopped is StopReason.TIMEOUT:
            # At the provision's own deadline the instance may be healthy: the rollback gives it back.
            raise_if_past_deadline(self._context, self._plan)
        await self._give_up(claimed, waited)
        return None

    async def _give_up(self, claimed: Instance, waited: WaitResult) -> None:
        event = End(
            reason=RetireReason.FAILED if waited.stopped is StopReason.VERDICT else RetireReason.TIMED_OUT,
            report=waited.report,
            claim=claimed.claim,
        )
        why = describe_failure(waited)
        self._recorder.reject(RejectionKind.REGISTRATION_FAILED, why, claimed.instance_id)
        try:
            await transition(self._context, claimed, event, by=Actor.PROVISION, why=why)
        except Conflict:
            self._context.event_log.record("claim-lost", "released by another process", instance_id=claimed.instance_id)
        self._acquired.remove(claimed)
        self._failures += 1
        if self._failures > self._plan.provision.count + EXTRA_FAILURES_ALLOWED:
            raise Unavailable(f"{self._failures} instances of the pool failed to register; the last: {why}")


def _claim_reason(message: PoolMessage, plan: ProvisionPlan) -> str:
    lowered = "" if message.tier is plan.request.tier else f"; tier {plan.request.tier} from now on"
    return f"matches the request{lowered}"


def _is_still_idle(current: object, message: PoolMessage) -> bool:
    """Whether the claim failed only because the instance is about to expire. It may be renewed, so its message stays.

    A message that differs from the record is deleted: the next one is correct.
    """
    if not isinstance(current, Instance) or current.retire_reason is not None:
        return False
    return current.state is State.IDLE and current.message() == message


def _claim_lost_reason(current: object, message: PoolMessage) -> str:
    if not isinstance(current, Instance):
        return "stale pool message: the instance has no record"
    if current.epoch != message.epoch:
        return f"stale pool message: epoch {message.epoch}, current epoch {current.epoch}"
    if current.retire_reason is not None:
        return f"the instance is retired: {current.retire_text}"
    if (current.tier, current.repository) != (message.tier, message.repository):
        return "wrong pool message: the record has another tier or repository"
    return f"the instance is {current.state}, or about to expire"
