"""Mutants: bugs that the simulation must catch, some of each class, at most `MAX_MUTANTS`.

A mutant shows that the simulation catches its class, not how much it catches: new mistakes are tried by hand.
Each mutant names the code that it replaces: module, function, and the expression, statements or argument in it. If that
code was renamed or moved, `tests/unit/simulation/test_mutants.py` fails and says where; update the names here.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import partial

from simulation.campaign import CampaignSettings
from simulation.faults import Fault, Swarm
from simulation.mutation import NodeKind, Replacement


class BugClass(StrEnum):
    """What kind of mistake a mutant stands for."""

    RULE = "a condition or an effect of a decision is missing"
    TRUST = "an instance or a credential reaches somebody who must not have it"
    ORDER = "two steps are in the wrong order"
    STALE = "a value that has changed since decides"
    TIMER = "a limit is too short, too long, or that of another case"
    LIVENESS = "what must be done is never done"
    AGENT = "a machine acts too early, too late or again"
    SET = "a runner set asks for too much, or gives up what it needs"


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutant:
    name: str
    kind: BugClass
    #: The bug, in one sentence.
    bug: str
    replacements: tuple[Replacement, ...]
    #: Settings to simulate it with, if the usual ones need too many seeds.
    settings: CampaignSettings | None = None


_TRANSITIONS = "remuda.domain.transitions.apply"
_INSTANCE = "remuda.domain.instance"
_SIGNALS = "remuda.domain.signals"
_NEXT_STEP = "remuda.domain.decide.next_step"
_POOL_PUBLISHER = "remuda.controlplane.pool_publisher"
_RESOURCES = "remuda.domain.resources"
_POOL_CONFIG = "remuda.domain.pool_config"
_CONTEXT = "remuda.controlplane.context"
_PROVISION_PLAN = "remuda.controlplane.provision.plan"
_PROVISION = "remuda.controlplane.provision"
_PICKUP = "remuda.controlplane.provision.pickup"
_CREATION = "remuda.controlplane.provision.creation"
_ROLLBACK = "remuda.controlplane.provision.rollback"
_RELEASE = "remuda.controlplane.release"
_PROVISION_SWEEP = "remuda.controlplane.refresh.provisions"
_ENDED_RUNS = "remuda.controlplane.refresh.ended_runs"
_MACHINE_SWEEP = "remuda.controlplane.refresh.machines"
_SESSION = "remuda.controlplane.demand.session"
_LEASE = "remuda.controlplane.demand.lease"
_ACQUISITION = "remuda.controlplane.demand.acquisition"
_EQUIPMENT = "remuda.controlplane.demand.equipment"
_BINDING = "remuda.controlplane.demand.binding"
_SUPPLY = "remuda.domain.supply"
_DECIDE = "remuda.agent.decide"
_LOOP = "remuda.agent.loop"


def _only(*faults: Fault) -> CampaignSettings:
    return CampaignSettings(hours=0.25, instances=5, faults=frozenset(faults))


#: Small worlds with few faults, and worlds in which one thing happens often.
_FEW_FAULTS = CampaignSettings(hours=0.25, instances=5, faults=Swarm.FEW)
_SENT_AWAY = _only(Fault.LISTENER_DIES)
_UNRELEASED = _only(Fault.RUN_UNRELEASED, Fault.RERUN)
#: Worlds with runner sets: with half of all faults, and those whose listeners are killed.
_SETS = CampaignSettings(hours=0.15, instances=3, demand=True)
_LOST_LISTENERS = CampaignSettings(hours=0.15, instances=3, demand=True, faults=frozenset({Fault.LISTENER_CRASH}))


expression = partial(Replacement, NodeKind.EXPRESSION)
statements = partial(Replacement, NodeKind.STATEMENTS)
argument = partial(Replacement, NodeKind.ARGUMENT)
entry = partial(Replacement, NodeKind.ENTRY)


def _mutant(
    name: str, kind: BugClass, bug: str, *replacements: Replacement, settings: CampaignSettings | None = None
) -> Mutant:
    return Mutant(name=name, kind=kind, bug=bug, replacements=replacements, settings=settings)


#: Each one costs some seconds of `make simulate`. A new one replaces one of its class.
MAX_MUTANTS = 50
MUTANTS: tuple[Mutant, ...] = (
    _mutant(
        "claim-keeps-epoch",
        BugClass.RULE,
        "a claim does not raise the epoch",
        entry(_TRANSITIONS, "_claim", "'epoch': instance.epoch + 1", "'epoch': instance.epoch"),
    ),
    _mutant(
        "claim-without-epoch",
        BugClass.RULE,
        "a claim does not compare the epoch: a stale message claims",
        expression(
            _TRANSITIONS,
            "WriteCondition.is_met_by",
            "record.epoch == self.epoch",
            "record.epoch == self.epoch or self.state is State.IDLE",
        ),
    ),
    _mutant(
        "claim-of-the-retired",
        BugClass.RULE,
        "a claim takes an instance that is to be retired",
        argument(_TRANSITIONS, "_claim", "not_retired=True", ""),
    ),
    _mutant(
        "create-over-a-tombstone",
        BugClass.RULE,
        "a record is created although there is one",
        expression(
            _TRANSITIONS, "WriteCondition.is_met_by", "record is None and self.state is None", "self.state is None"
        ),
    ),
    _mutant(
        "signals-of-any-epoch",
        BugClass.RULE,
        "a signal of an earlier epoch counts",
        expression(_SIGNALS, "_verdict", "report.epoch != epoch", "report.epoch > epoch"),
    ),
    _mutant(
        "release-without-attempt",
        BugClass.RULE,
        "a release also takes the machines of a later attempt",
        expression(_RELEASE, "_mark_released", "item.attempt <= attempt", "True"),
    ),
    _mutant(
        "ended-run-of-any-attempt",
        BugClass.RULE,
        "the provisions of a newer attempt are released with the ended one",
        expression(
            _ENDED_RUNS,
            "_check",
            "waited is None or current is None or not current.has_ended or current.attempt != before.ended_attempt",
            "waited is None",
        ),
        expression(
            _ENDED_RUNS,
            "_release",
            "not is_committed or provision.attempt > ended.ended_attempt",
            "not is_committed",
        ),
        settings=_UNRELEASED,
    ),
    _mutant(
        "quarantined-and-retired",
        BugClass.RULE,
        "a machine in quarantine is terminated before the quarantine ends",
        statements(_INSTANCE, "decide_retirement", "if instance.is_quarantined(now):\n    ...", ""),
        # The condition of the write checks it once more.
        argument(_TRANSITIONS, "_end", "max_quarantined_until=...", ""),
    ),
    _mutant(
        "limit-without-the-new",
        BugClass.RULE,
        "the launched instances do not count for the maximum",
        expression(_CREATION, "Creation._count_within_limit", "live + count <= limit", "live <= limit"),
        settings=_FEW_FAULTS,
    ),
    _mutant(
        "claim-across-tiers",
        BugClass.TRUST,
        "a run gets an instance of another trust tier",
        expression(_RESOURCES, "mismatch", "message.tier not in request.reuse.tiers(request.tier)", "not request.tier"),
        expression(_TRANSITIONS, "_claim", "instance.tier not in tiers", "not event.tier"),
        argument(_TRANSITIONS, "_claim", "tiers=tiers", ""),
    ),
    _mutant(
        "ephemeral-in-the-pool",
        BugClass.TRUST,
        "a machine for one job is not retired at creation, and is pooled",
        statements(_PROVISION_PLAN, "ProvisionPlan.retire_reason", "return RetireReason.EPHEMERAL", "return None"),
    ),
    _mutant(
        "registrations-of-other-pools",
        BugClass.TRUST,
        "a runner of another pool whose name begins alike counts as stale",
        expression(
            _POOL_CONFIG,
            "parse_runner_name",
            "not _EPOCH.fullmatch(epoch) or not is_instance_id(instance_id)",
            "not _EPOCH.fullmatch(epoch)",
        ),
    ),
    _mutant(
        "untrusted-and-reused",
        BugClass.TRUST,
        "a machine of a trusted set that served an untrusted job keeps its tier and is not retired",
        entry(_TRANSITIONS, "_bind", "'tier': tier", "'tier': instance.tier"),
        expression(
            _TRANSITIONS,
            "_bind",
            "tier is Tier.UNTRUSTED and Tier.TRUSTED in {event.set_tier, instance.tier}",
            "not tier",
        ),
        settings=_SETS,
    ),
    _mutant(
        "fork-by-its-event",
        BugClass.TRUST,
        "a pull request counts as trusted, whatever its head repository is",
        expression(_BINDING, "Binder._trust", "run.head_repository if run else ''", "event.repository"),
        settings=_SETS,
    ),
    _mutant(
        "configuration-kept-while-bound",
        BugClass.TRUST,
        "the just-in-time configuration stays on the record while a job runs",
        argument(_TRANSITIONS, "_bind", "jit_config=''", ""),
        settings=_SETS,
    ),
    _mutant(
        "launch-before-intent",
        BugClass.ORDER,
        "machines are launched before the provision is recorded",
        statements(_PROVISION, "provision", "await record_intent(context, plan.provision)", ""),
        statements(
            _PROVISION,
            "provision",
            "recorder.end_phase('instances')",
            "recorder.end_phase('instances')\nawait record_intent(context, plan.provision)",
        ),
    ),
    _mutant(
        "commit-point-first",
        BugClass.ORDER,
        "the provision is committed before its instances run",
        statements(
            _PROVISION,
            "_commit",
            "for result in await map_concurrently(acquired.all(), start):\n    ...",
            "early = tuple(item.instance.instance_id for item in acquired.all())\n"
            "await record_commit(context, provision, committed(provision, early, deadline=provision.deadline))\n"
            "for result in await map_concurrently(acquired.all(), start):\n"
            "    if isinstance(result, RemudaError):\n"
            "        raise result",
        ),
        statements(
            _PROVISION,
            "_commit",
            "await record_commit("
            "context, provision, committed(provision, ids, deadline=deadline, outcome=recorder.outcome()))",
            "",
        ),
    ),
    _mutant(
        "terminate-before-the-lock",
        BugClass.ORDER,
        "a rollback terminates a machine before its record is locked",
        statements(
            _ROLLBACK,
            "_tombstone",
            "now = context.clock.now()",
            "await context.compute.terminate([instance.instance_id])\nnow = context.clock.now()",
        ),
    ),
    _mutant(
        "flag-before-message",
        BugClass.ORDER,
        "an instance is marked as announced before the message is sent",
        statements(
            _POOL_PUBLISHER,
            "_send_messages",
            "if idle:\n    ...",
            "await _record_sent(context, idle, by=Actor.REFRESH)\n"
            "await context.pool.send([instance.message() for instance in idle])",
        ),
    ),
    _mutant(
        "pool-before-the-reset",
        BugClass.ORDER,
        "an instance is pooled when it is deregistered, before it is reset",
        expression(_SIGNALS, "removal_verdict", "Signal.UD_REMOVE_REG_REMOVE_RUN_OK", "Signal.UD_REMOVE_REG_OK"),
    ),
    _mutant(
        "launch-without-its-record",
        BugClass.ORDER,
        "machines for a set are launched, and nothing says so before",
        expression(_ACQUISITION, "_Batch._launch", "self._record.store()", "asyncio.sleep(0)"),
        settings=_SETS,
    ),
    _mutant(
        "adopt-a-sibling",
        BugClass.STALE,
        "after a failed condition a record with the expected state and epoch counts as our own write",
        expression(
            _CONTEXT,
            "is_applied",
            "replace(current, **change.sets) == current",
            "(current.state, current.epoch) == (change.sets.get('state'), change.sets.get('epoch'))",
        ),
    ),
    _mutant(
        "renewal-that-comes-late",
        BugClass.STALE,
        "a delayed renewal cuts a later one short",
        expression(
            _TRANSITIONS,
            "_effect",
            "_not_shortened(replace(alive, not_retired=True), {'threshold': event.until})",
            "(replace(alive, not_retired=True), {'threshold': event.until})",
        ),
    ),
    _mutant(
        "taken-back-from-another",
        BugClass.STALE,
        "a sweep takes back an instance that another provision has claimed since",
        expression(
            _PROVISION_SWEEP,
            "settle",
            "instance.provision_id == provision.provision_id",
            "True",
        ),
    ),
    _mutant(
        "current-registration-is-stale",
        BugClass.STALE,
        "the registration of the current assignment counts as stale",
        expression(_POOL_CONFIG, "stale_registration_reason", "epoch < record.epoch", "epoch <= record.epoch"),
    ),
    _mutant(
        "ended-run-read-once",
        BugClass.STALE,
        "a run that was run again in the grace period is released although its new attempt needs the instances",
        expression(
            _ENDED_RUNS,
            "_check",
            "waited is None or current is None or not current.has_ended or current.attempt != before.ended_attempt",
            "waited is None",
        ),
        settings=_UNRELEASED,
    ),
    _mutant(
        "expiry-without-margin",
        BugClass.TIMER,
        "an instance is terminated as soon as this process's clock passes its threshold",
        expression(
            _NEXT_STEP,
            "end_of_time",
            "expired(instance.deadline(busy=busy), now=now, margin_s=margin_s)",
            "expired(instance.deadline(busy=busy), now=now, margin_s=0.0)",
        ),
        expression(
            _NEXT_STEP,
            "end_of_time",
            "End(reason=RetireReason.EXPIRED, detail=detail, margin_s=margin_s)",
            "End(reason=RetireReason.EXPIRED, detail=detail)",
        ),
    ),
    _mutant(
        "runtime-after-the-deadline",
        BugClass.TIMER,
        "the maximum runtime counts from the provision's deadline, not from the commit",
        expression(
            _TRANSITIONS, "_commit", "after(now, event.max_runtime_s)", "after(instance.threshold, event.max_runtime_s)"
        ),
        settings=_FEW_FAULTS,
    ),
    _mutant(
        "half-the-age",
        BugClass.TIMER,
        "an instance is too old at half of the maximum age",
        expression(
            _INSTANCE,
            "decide_retirement",
            "(now - instance.created_at).total_seconds() >= max_age_s",
            "(now - instance.created_at).total_seconds() >= max_age_s / 2",
        ),
        settings=_FEW_FAULTS,
    ),
    _mutant(
        "extension-without-end",
        BugClass.TIMER,
        "a release is extended beyond its run's deadline",
        expression(_TRANSITIONS, "_extend", "min(wanted, latest)", "wanted"),
    ),
    _mutant(
        "gone-at-first-sight",
        BugClass.TIMER,
        "a machine that is missing from one list counts as gone",
        statements(
            _MACHINE_SWEEP,
            "_close_if_gone",
            "if view is None and not _is_gone(...):\n    ...",
            "",
        ),
    ),
    _mutant(
        "ended-run-without-grace",
        BugClass.TIMER,
        "a run that has just ended is released before its own release job could come",
        expression(_ENDED_RUNS, "_check", "waited < grace", "waited < 0 * grace"),
        settings=_UNRELEASED,
    ),
    _mutant(
        "lease-without-expiry",
        BugClass.TIMER,
        "the lease of a listener that was killed never expires",
        expression(_LEASE, "ListenerLease._is_free", "unchanged_s >= EXPIRES_AFTER_S", "unchanged_s < 0"),
        settings=_LOST_LISTENERS,
    ),
    _mutant(
        "no-rollback",
        BugClass.LIVENESS,
        "a failed provision gives nothing back",
        statements(_PROVISION, "provision", "await _undo(...)", ""),
    ),
    _mutant(
        "announced-once",
        BugClass.LIVENESS,
        "a message that the queue lost is never sent again",
        expression(_NEXT_STEP, "_in_pool", "now - instance.announced_at >= republish", "False"),
    ),
    _mutant(
        "surplus-kept-hidden",
        BugClass.LIVENESS,
        "messages that no worker needs stay hidden",
        statements(_PICKUP, "PickupManager._run_pass", "if surplus:\n    ...", ""),
        settings=_FEW_FAULTS,
    ),
    _mutant(
        "notice-of-the-idle-ignored",
        BugClass.LIVENESS,
        "a sweep does not retire machines with a spot notice",
        expression(_NEXT_STEP, "next_step", "_retire_after_notice(instance, report, now=now)", "None"),
        settings=_FEW_FAULTS,
    ),
    _mutant(
        "ended-and-never-released",
        BugClass.LIVENESS,
        "a run that ends without a release keeps its instances until its maximum runtime",
        expression(_ENDED_RUNS, "_check", "waited < grace", "True"),
        settings=_UNRELEASED,
    ),
    _mutant(
        "acknowledged-and-forgotten",
        BugClass.LIVENESS,
        "the jobs of a message are neither remembered nor counted",
        statements(_SESSION, "SetSession._handle", "state.note_jobs(jobs)", ""),
        statements(
            _SESSION,
            "SetSession._handle",
            "state.note_statistics(message.statistics, completed=len(ends))",
            "",
        ),
        settings=_SETS,
    ),
    _mutant(
        "start-before-running",
        BugClass.AGENT,
        "the runner is started as soon as it is registered",
        statements(_DECIDE, "_when_assigned", "return _wait(...)", "return _when_running(observation, record)"),
    ),
    _mutant(
        "signal-before-configure",
        BugClass.AGENT,
        "the agent signals the registration before it is made",
        statements(
            _LOOP,
            "Agent._act",
            "result = await self._runner.register(record.assignment)",
            "await self._signal(record, Signal.UD_REG_OK, 'soon')\n"
            "result = await self._runner.register(record.assignment)",
        ),
    ),
    _mutant(
        "stop-before-removal",
        BugClass.AGENT,
        "the runner is stopped while it is registered, even if it runs a job",
        statements(
            _DECIDE,
            "_when_releasing",
            "if observation.runner.busy:\n    ...",
            "if observation.runner.listening:\n    return AgentStep(action=AgentAction.STOP, reason='released')",
        ),
    ),
    _mutant(
        "agent-without-margin",
        BugClass.AGENT,
        "an agent terminates its machine as soon as its own clock passes the threshold",
        argument(_DECIDE, "next_step", "margin_s=observation.margin_s", "margin_s=0.0"),
    ),
    _mutant(
        "dead-man-not-rearmed",
        BugClass.AGENT,
        "the dead-man timer stays at the first threshold",
        statements(_LOOP, "Expiry.observe", "self._set_dead_man_timer(busy)", ""),
    ),
    _mutant(
        "sent-away-is-served",
        BugClass.AGENT,
        "an agent takes the end of a runner that GitHub sent away for the end of its only job",
        expression(
            _DECIDE,
            "_when_running",
            "observation.runner.unused or (observation.runner.spent and not observation.runner.saw_job)",
            "False",
        ),
        settings=_SENT_AWAY,
    ),
    _mutant(
        "second-job-of-a-registration",
        BugClass.AGENT,
        "an agent starts the runner of a set again after its job",
        expression(
            _DECIDE,
            "_when_running",
            "observation.runner.unused or spent_epoch(record, observation.runner)",
            "observation.runner.unused",
        ),
        statements(
            _DECIDE,
            "_when_running",
            "if observation.runner.spent:\n    return _wait('its only job has ended; waiting for release')",
            "",
        ),
        settings=_SETS,
    ),
    _mutant(
        "free-capacity-announced",
        BugClass.SET,
        "a poll announces how many more runners the set may have, not its maximum",
        expression(
            _SESSION, "SetSession.poll", "state.runner_set.max", "state.runner_set.max - state.statistics.assigned"
        ),
        settings=_SETS,
    ),
    _mutant(
        "surplus-without-deregistration",
        BugClass.SET,
        "a runner that is not needed is released while it can still get a job",
        statements(
            _EQUIPMENT,
            "Equipment.withdraw",
            "if runner_id:\n    deletion = await self._demand.source.deregister(state.runner_set, runner_id)",
            "",
        ),
        settings=_SETS,
    ),
    _mutant(
        "completed-is-spent",
        BugClass.SET,
        "GitHub's message about a completed job ends a machine that still works",
        expression(_SUPPLY, "_classify_running", "machine.is_spent", "machine.is_spent or machine.completed"),
        settings=_SETS,
    ),
    _mutant(
        "listener-before-the-boot",
        BugClass.SET,
        "a machine gets its registration before it has booted",
        expression(
            _SUPPLY,
            "_classify_coming",
            "instance.state is State.CLAIMED or booted is Verdict.OK",
            "instance.state in {State.CLAIMED, State.CREATED}",
        ),
        expression(
            _TRANSITIONS,
            "_equip",
            "instance.state is State.CREATED and boot_verdict(event.report, instance.epoch) is not Verdict.OK",
            "not instance.epoch",
        ),
        settings=_SETS,
    ),
)
