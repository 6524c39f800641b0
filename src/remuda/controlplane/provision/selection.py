"""Claim workers: each takes one idle instance from the pool and waits until it is registered."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from remuda.controlplane.context import Context, apply_surely, transition
from remuda.controlplane.provision.outcome import OutcomeRecorder
from remuda.controlplane.provision.pickup import PickupManager
from remuda.controlplane.provision.rollback import AcquiredInstances
from remuda.controlplane.signal_waiter import Ended, SignalWaiter, WaitResult
from remuda.domain.errors import Conflict, TimedOut, Unavailable, Unreadable, UserError
from remuda.domain.instance import EPHEMERAL, NEVER_REUSED, Assignment, Credential, Instance, State
from remuda.domain.pool_config import PoolConfig, runner_name
from remuda.domain.provision import Provision, ProvisionStatus
from remuda.domain.provision_outcome import RunnerSource
from remuda.domain.resources import PoolMessage, Reuse, RunnerRequest, folded
from remuda.domain.signals import CREDENTIAL_REFUSED, FORGE_UNREACHABLE, Report, Signal, Verdict, registration_verdict
from remuda.domain.transitions import Actor, Cause, Claim, End, advance, presumed
from remuda.ports.pool import Delivery

#: A warm machine that has not registered by then is too slow.
CLAIM_WAIT_S = 60.0
#: So many claimed machines more than asked for may fail before the provision gives up: a fault of ours would else
#: burn the whole pool.
SPARE_FAILURES = 3
#: How old the shared knowledge that the provision is open may be.
OPEN_CHECK_S = 1.0
#: How often a provision that waits looks whether it was released meanwhile.
OPEN_WATCH_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RegisteredInstance:
    """Registered, runner off: ready to be committed."""

    instance: Instance
    source: RunnerSource
    report: Report | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ProvisionPlan:
    """What all instances of one provision have in common."""

    config: PoolConfig
    provision: Provision
    request: RunnerRequest
    scope: str
    #: None where each instance is registered just in time.
    registration: Credential | None
    #: The provision's deadline on our own monotonic clock.
    until: float
    #: The run's, as it was given.
    repository: str = ""

    @property
    def retired_because(self) -> str:
        """Why its new instances will not serve another run, or empty where they may."""
        if self.registration is None:
            return EPHEMERAL
        return NEVER_REUSED if self.request.reuse is Reuse.NEVER else ""

    def assignment(self, instance_id: str, epoch: int) -> Assignment:
        return Assignment(
            url=f"{self.config.github_url}/{self.scope}",
            runner_name=runner_name(self.config.pool, epoch, instance_id),
            labels=(self.provision.run_id, self.provision.resource_class),
            repository=self.repository,
            credential=self.registration,
        )


class Selection:
    def __init__(
        self,
        context: Context,
        terms: ProvisionPlan,
        pickup: PickupManager,
        holdings: AcquiredInstances,
        recorder: OutcomeRecorder,
    ) -> None:
        self._context = context
        self._terms = terms
        self._pickup = pickup
        self._holdings = holdings
        self._recorder = recorder
        self._failures = 0
        # Its record was written just now.
        self._open_until = context.clock.monotonic() + OPEN_CHECK_S

    async def take_one(self) -> RegisteredInstance | None:
        """An instance from the pool, registered; None when the pool has none that fits."""
        while True:
            raise_if_late(self._context, self._terms)
            delivery = await self._pickup.next()
            if delivery is None or delivery.message is None:
                return None
            await self._check_open()
            claimed = await self._claim(delivery, delivery.message)
            if claimed is None:
                continue
            ready = await self._await_registration(claimed)
            if ready is not None:
                return ready

    async def watch(self) -> None:
        """Ends a provision that somebody released, also while it only waits for machines."""
        while True:
            await self._context.clock.sleep(OPEN_WATCH_S)
            try:
                await self._check_open()
            except Unavailable as error:
                self._context.event_log.record("read-failed", error.message, run_id=self._terms.provision.run_id)

    async def _check_open(self) -> None:
        """A shared, recent read will do: the commit point catches what slips through."""
        now = self._context.clock.monotonic()
        if now < self._open_until:
            return
        self._open_until = now + OPEN_CHECK_S
        ours = self._terms.provision
        current = await self._context.store.get_provision(ours.run_id, ours.provision_id)
        if current is None or current.status is not ProvisionStatus.OPEN:
            raise Conflict(f"run {ours.run_id} was released while it was being provisioned", current=current)

    async def _claim(self, delivery: Delivery, message: PoolMessage) -> Instance | None:
        context, terms = self._context, self._terms
        now: datetime = context.clock.now()
        owner = f"{terms.provision.provision_id}/{context.ids.new('w-')}"
        hint = presumed(message, now=now)
        change = advance(
            hint,
            Claim(
                run_id=terms.provision.run_id,
                owner=owner,
                provision_id=terms.provision.provision_id,
                scope=terms.scope,
                tier=terms.request.tier,
                threshold=terms.provision.deadline,
                assignment=terms.assignment(message.id, message.epoch + 1),
                reuse=terms.request.reuse,
                repository=folded(terms.repository),
                margin_s=terms.config.lifetimes.margin_s,
            ),
            by=Actor.PROVISION,
            now=now,
            why=_why_claimed(message, terms),
        )
        # Before the call: if it is cut, the write may have happened all the same.
        hoped_for = change.applied_to(hint)
        self._holdings.hold(hoped_for)
        try:
            claimed = await apply_surely(context, change)
        except Conflict as conflict:
            self._holdings.drop(hoped_for)
            why = _why_lost(conflict.current, message)
            self._recorder.refuse("lost", why, message.id)
            if not _is_still_idle(conflict.current, message):
                self._pickup.used(delivery)
            context.event_log.record("claim-lost", why, instance_id=message.id, run_id=terms.provision.run_id)
            return None
        except Unreadable as error:
            # The next one will do. Its message comes back, for when somebody has mended the record.
            self._holdings.drop(hoped_for)
            self._recorder.refuse("unreadable", error.message, message.id)
            context.event_log.record("claim-failed", error.message, instance_id=message.id)
            return None
        self._holdings.hold(claimed)
        self._pickup.used(delivery)
        context.event_log.record(
            "claim-won",
            change.entry.why,
            instance_id=claimed.instance_id,
            run_id=claimed.run_id,
            epoch=claimed.epoch,
        )
        return claimed

    async def _await_registration(self, claimed: Instance) -> RegisteredInstance | None:
        clock = self._context.clock
        wait = SignalWaiter(
            self._context, instance_id=claimed.instance_id, epoch=claimed.epoch, verdict_of=registration_verdict
        )
        waited = await wait.wait(until=min(self._terms.until, clock.monotonic() + CLAIM_WAIT_S))
        if waited.verdict is Verdict.OK:
            return RegisteredInstance(instance=claimed, source=RunnerSource.POOL, report=waited.report)
        raise_if_hopeless(waited)
        if waited.ended is Ended.TIMEOUT:
            # Too slow for this run is not yet sick: it is given back.
            raise_if_late(self._context, self._terms)
        await self._give_up(claimed, waited)
        return None

    async def _give_up(self, claimed: Instance, waited: WaitResult) -> None:
        failed = waited.ended is Ended.VERDICT
        event = End(
            cause=Cause.FAILED if failed else Cause.TIMED_OUT,
            report=waited.report,
            owner=claimed.owner,
        )
        why = describe_failure(waited)
        self._recorder.refuse("failed", why, claimed.instance_id)
        try:
            await transition(self._context, claimed, event, by=Actor.PROVISION, why=why)
        except Conflict:
            self._context.event_log.record("claim-lost", "taken away meanwhile", instance_id=claimed.instance_id)
        self._holdings.drop(claimed)
        self._failures += 1
        if self._failures > self._terms.provision.count + SPARE_FAILURES:
            raise Unavailable(f"{self._failures} instances of the pool failed to register; the last: {why}")


def _why_claimed(message: PoolMessage, terms: ProvisionPlan) -> str:
    falls = "" if message.tier is terms.request.tier else f"; {terms.request.tier} from now on"
    return f"fits run {terms.provision.run_id}{falls}"


def _is_still_idle(current: object, message: PoolMessage) -> bool:
    """Refused for its threshold alone: its time may be renewed, so the hint stays and comes back by itself. One that
    says other things than the record goes: the next announcement tells the truth.
    """
    if not isinstance(current, Instance) or current.retire:
        return False
    return current.state is State.IDLE and current.message() == message


def _why_lost(current: object, message: PoolMessage) -> str:
    if not isinstance(current, Instance):
        return "the message is stale: there is no record"
    if current.epoch != message.epoch:
        return f"the message is stale: assignment {message.epoch}, the record is at {current.epoch}"
    if current.retire:
        return f"it is retired: {current.retire}"
    if (current.tier, current.repository) != (message.tier, message.repository):
        return "the message lies: the record has another tier, or served another repository"
    return f"the record is {current.state}, or about to expire"


def describe_failure(waited: WaitResult) -> str:
    if waited.ended is Ended.VERDICT and waited.report is not None:
        return f"{waited.report.signal}: {waited.report.detail}"
    return f"not registered: {waited.ended.value}"


def raise_if_late(context: Context, terms: ProvisionPlan) -> None:
    """When time is up nothing more is claimed or launched: it would only be ended again."""
    if context.clock.monotonic() >= terms.until:
        raise TimedOut(
            f"run {terms.provision.run_id} has not got its {terms.provision.count} instances in time",
            fix="raise --provision-timeout-sec",
        )


def raise_if_hopeless(waited: WaitResult) -> None:
    """A credential that the github refuses, or a script that fails, would fail everywhere."""
    report = waited.report
    if waited.verdict is not Verdict.FAILED or report is None:
        return
    if CREDENTIAL_REFUSED in report.detail:
        raise UserError(
            f"GitHub refused the registration: {report.detail}",
            field="github-token",
            fix="check the credential's rights on the scope and run remuda refresh",
        )
    if FORGE_UNREACHABLE in report.detail:
        raise Unavailable(f"the runners cannot register: {report.detail}", fix="try again when GitHub answers")
    if report.signal is Signal.UD_FAILED:
        raise UserError(
            f"the pre-runner script failed: {report.detail}",
            field="pre-runner-script",
            fix="mend the script and run remuda refresh",
        )
