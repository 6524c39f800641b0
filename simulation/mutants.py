"""Mutants: bugs that the simulation must catch.

Each mutant names the code that it replaces: module, function, and the expression, statements or argument in it. If that
code was renamed or moved, `tests/unit/simulation/test_mutants.py` fails and says where; update the names here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from simulation.campaign import CampaignSettings
from simulation.faults import Fault, Swarm
from simulation.mutation import NodeKind, Replacement


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutant:
    name: str
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
_SELECTION = "remuda.controlplane.provision.selection"
_PICKUP = "remuda.controlplane.provision.pickup"
_CREATION = "remuda.controlplane.provision.creation"
_ROLLBACK = "remuda.controlplane.provision.rollback"
_RELEASE = "remuda.controlplane.release"
_SWEEP = "remuda.controlplane.refresh.sweep"
_ENDED_RUNS = "remuda.controlplane.refresh.ended_runs"
_MACHINE_SWEEP = "remuda.controlplane.refresh.machines"
_SCALE_DOWN = "remuda.controlplane.scale_down.pool_records"
_SESSION = "remuda.controlplane.demand.session"
_LEASE = "remuda.controlplane.demand.lease"
_EQUIPMENT = "remuda.controlplane.demand.equipment"
_BINDING = "remuda.controlplane.demand.binding"
_RERUN = "remuda.controlplane.demand.rerun"
_SUPPLY = "remuda.domain.supply"
_DECIDE = "remuda.agent.decide"
_LOOP = "remuda.agent.loop"

#: Operator commands while other commands are paused or slow.
_OPERATED = CampaignSettings(
    hours=0.25, instances=5, faults=frozenset({Fault.DRAIN, Fault.QUARANTINE, Fault.PAUSE, Fault.SLOW_CALL})
)


def _only(*faults: Fault, hours: float = 0.25, instances: int = 5) -> CampaignSettings:
    return CampaignSettings(hours=hours, instances=instances, faults=frozenset(faults))


#: Small worlds with few faults, and worlds in which one thing happens often.
_FEW_FAULTS = CampaignSettings(hours=0.25, instances=5, faults=Swarm.FEW)
_QUARANTINED = _only(Fault.QUARANTINE)
_PAUSED = _only(Fault.PAUSE)
_AGED = _only(Fault.CONFIG_CHANGE, hours=0.5)
_NOTICED = _only(Fault.SPOT_NOTICE)
_RELEASED_EARLY = _only(Fault.RELEASE_EARLY)
_SENT_AWAY = _only(Fault.LISTENER_DIES)
_EXTENDED_TWICE = _only(Fault.CLOCK_SKEW, Fault.RERUN, Fault.RELEASE_TWICE)
_UNRELEASED = _only(Fault.RUN_UNRELEASED, Fault.RERUN)
_HANGING = _only(Fault.GITHUB_HANGS, Fault.GITHUB_5XX)


#: Worlds with runner sets: with half of all faults, without faults, and those whose listeners are killed.
_SETS = CampaignSettings(hours=0.15, instances=3, demand=True)
_CALM_SETS = CampaignSettings(hours=0.15, instances=3, demand=True, faults=frozenset())
_SPOT_SETS = CampaignSettings(hours=0.15, instances=3, demand=True, faults=frozenset({Fault.SPOT_NOTICE}))
_LOST_LISTENERS = CampaignSettings(hours=0.15, instances=3, demand=True, faults=frozenset({Fault.LISTENER_CRASH}))


expression = partial(Replacement, NodeKind.EXPRESSION)
statements = partial(Replacement, NodeKind.STATEMENTS)
argument = partial(Replacement, NodeKind.ARGUMENT)
entry = partial(Replacement, NodeKind.ENTRY)


def _mutant(name: str, bug: str, *replacements: Replacement, settings: CampaignSettings | None = None) -> Mutant:
    return Mutant(name=name, bug=bug, replacements=replacements, settings=settings)


MUTANTS: tuple[Mutant, ...] = (
    # Claims
    _mutant(
        "claim-without-epoch",
        "a claim does not compare the epoch: a stale message claims",
        expression(
            _TRANSITIONS,
            "WriteCondition.is_met_by",
            "record.epoch == self.epoch",
            "record.epoch == self.epoch or self.state is State.IDLE",
        ),
    ),
    _mutant(
        "claim-keeps-epoch",
        "a claim does not raise the epoch",
        entry(_TRANSITIONS, "_claim", "'epoch': instance.epoch + 1", "'epoch': instance.epoch"),
    ),
    _mutant(
        "claim-of-the-expiring",
        "a claim does not check the threshold",
        argument(_TRANSITIONS, "_claim", "threshold_after=...", ""),
    ),
    _mutant(
        "claim-of-the-retired",
        "a claim takes an instance that is to be retired",
        argument(_TRANSITIONS, "_claim", "not_retired=True", ""),
    ),
    _mutant(
        "claim-across-tiers",
        "a run gets an instance of another trust tier",
        expression(_RESOURCES, "mismatch", "message.tier not in request.reuse.tiers(request.tier)", "not request.tier"),
        expression(_TRANSITIONS, "_claim", "instance.tier not in tiers", "not event.tier"),
        argument(_TRANSITIONS, "_claim", "tiers=tiers", ""),
    ),
    _mutant(
        "claim-across-repositories",
        "a claim ignores the repository that a machine has served",
        expression(_RESOURCES, "mismatch", "request.reuse is Reuse.SAME_REPO", "request.reuse is None"),
        expression(
            _TRANSITIONS, "_claim", "event.reuse is Reuse.SAME_REPO and not only_repository", "event.reuse is None"
        ),
    ),
    _mutant(
        "repository-of-the-last-run",
        "a claim records the run's repository as the only one, whatever the machine served before",
        entry(_TRANSITIONS, "_claim", "'repository': only_repository", "'repository': event.repository"),
    ),
    _mutant(
        "tier-that-rises",
        "with reuse `always` a machine of the lower tier is given to a run of the higher one",
        expression(
            _RESOURCES, "Reuse.tiers", "self is Reuse.ALWAYS and tier is Tier.UNTRUSTED", "self is Reuse.ALWAYS"
        ),
    ),
    _mutant(
        "tier-that-stays",
        "a machine that served an untrusted run keeps its trusted tier",
        entry(_TRANSITIONS, "_claim", "'tier': event.tier", "'tier': instance.tier"),
    ),
    _mutant(
        "ephemeral-in-the-pool",
        "a machine for one job is not retired at creation, and is pooled",
        statements(_PROVISION_PLAN, "ProvisionPlan.retire_reason", "return RetireReason.EPHEMERAL", "return None"),
    ),
    _mutant(
        "jit-kept-on-the-record",
        "a just-in-time configuration stays on the record after it was used",
        argument(_TRANSITIONS, "_with_credential", "jit_config=''", ""),
    ),
    _mutant(
        "spent-is-failed",
        "a listener that served its one job is started again and counts as failed",
        statements(_DECIDE, "_when_running", "if observation.runner.spent:\n    ...", ""),
    ),
    _mutant(
        "sent-away-is-served",
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
        "claim-under-the-old-name",
        "the runner's name carries the epoch before the claim",
        expression(_SELECTION, "Selection._try_claim", "message.epoch + 1", "message.epoch"),
    ),
    _mutant(
        "delete-before-claim",
        "a message is deleted whether or not its claim succeeds",
        statements(
            _SELECTION,
            "Selection._try_claim",
            "expected = change.applied_to(idle)",
            "self._pickup.mark_used(delivery)\nexpected = change.applied_to(idle)",
        ),
    ),
    _mutant(
        "delete-what-expires",
        "a message is deleted although its instance is idle and may be renewed",
        expression(_SELECTION, "Selection._try_claim", "_is_still_idle(conflict.current, message)", "False"),
    ),
    _mutant(
        "adopt-a-sibling",
        "after a failed condition a record with the expected state and epoch counts as our own write",
        expression(
            _CONTEXT,
            "is_applied",
            "replace(current, **change.sets) == current",
            "(current.state, current.epoch) == (change.sets.get('state'), change.sets.get('epoch'))",
        ),
    ),
    _mutant(
        "acquired-by-instance",
        "a worker that loses a race makes its provision forget what another worker claimed",
        expression(
            _ROLLBACK,
            "AcquiredInstances.add",
            "self._items[instance.instance_id, instance.epoch]",
            "self._items[instance.instance_id, 0]",
        ),
        expression(
            _ROLLBACK,
            "AcquiredInstances.remove",
            "(instance.instance_id, instance.epoch)",
            "(instance.instance_id, 0)",
        ),
    ),
    # Provision
    _mutant(
        "launch-before-intent",
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
        "no-rollback",
        "a failed provision gives nothing back",
        statements(_PROVISION, "provision", "await _undo(...)", ""),
    ),
    _mutant(
        "rollback-leaves-it-open",
        "a failed provision does not close its record",
        statements(_ROLLBACK, "roll_back", "await _guarded(context, _close_provision(...))", ""),
    ),
    _mutant(
        "success-after-release",
        "a provision that was released meanwhile reports success",
        expression(_PROVISION, "record_commit.write", "conflict.current != after", "False"),
    ),
    _mutant(
        "commit-point-first",
        "the provision is committed before its instances run",
        statements(
            _PROVISION,
            "_commit",
            "running: list[Instance] = []",
            "early = tuple(item.instance.instance_id for item in registered)\n"
            "await record_commit(context, provision, committed(provision, early, deadline=provision.deadline))\n"
            "running: list[Instance] = []",
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
        "commit-keeps-the-credential",
        "the registration token stays on the record while jobs run",
        expression(_TRANSITIONS, "_commit", "_with_credential(...)", "instance.assignment"),
    ),
    _mutant(
        "token-in-the-event-log",
        "a registration token is written to the event log",
        expression(_SELECTION, "Selection._try_claim", "change.entry.why", "f'with {plan.registration.token}'"),
    ),
    _mutant(
        "terminate-before-the-lock",
        "a rollback terminates a machine before its record is locked",
        statements(
            _ROLLBACK,
            "_tombstone",
            "now = context.clock.now()",
            "await context.compute.terminate([instance.instance_id])\nnow = context.clock.now()",
        ),
    ),
    _mutant(
        "create-over-a-tombstone",
        "a record is created although there is one",
        expression(
            _TRANSITIONS, "WriteCondition.is_met_by", "record is None and self.state is None", "self.state is None"
        ),
    ),
    # Signals
    _mutant(
        "signals-of-any-epoch",
        "a signal of an earlier epoch counts",
        expression(_SIGNALS, "_verdict", "report.epoch != epoch", "report.epoch > epoch"),
    ),
    _mutant(
        "pool-before-the-reset",
        "an instance is pooled when it is deregistered, before it is reset",
        expression(_SIGNALS, "removal_verdict", "Signal.UD_REMOVE_REG_REMOVE_RUN_OK", "Signal.UD_REMOVE_REG_OK"),
    ),
    _mutant(
        "signals-fall-back",
        "a late signal overwrites a later one",
        expression(_SIGNALS, "Report.may_become", "(epoch, signal.rank) >= (self.epoch, self.rank)", "True"),
    ),
    # Release
    _mutant(
        "release-without-attempt",
        "a release also takes the machines of a later attempt",
        expression(_RELEASE, "_mark_released", "item.attempt <= attempt", "True"),
    ),
    _mutant(
        "release-of-another-assignment",
        "a release takes an instance that has another assignment by now",
        expression(
            _RELEASE, "_InstanceReleaser.run", "instance.provision_id not in provision_ids", "not provision_ids"
        ),
    ),
    _mutant(
        "release-without-mark",
        "a release takes the machines and does not mark the provision",
        expression(
            _RELEASE,
            "_replace",
            "context.store.replace_provision(before, after)",
            "context.store.get_provision(before.run_id, before.provision_id)",
        ),
    ),
    _mutant(
        "flag-before-message",
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
        "credential-with-a-new-epoch",
        "the renewal of a credential raises the epoch",
        expression(
            _TRANSITIONS,
            "_effect",
            "{'assignment': _with_credential(instance, event.credential)}",
            "{'assignment': _with_credential(instance, event.credential), 'epoch': instance.epoch + 1}",
        ),
    ),
    _mutant(
        "extension-without-end",
        "a release is extended beyond its run's deadline",
        expression(_TRANSITIONS, "_extend", "min(wanted, latest)", "wanted"),
    ),
    _mutant(
        "extension-that-comes-late",
        "of two extensions of a release, the one with the slower clock cuts the other one short",
        expression(
            _TRANSITIONS,
            "_extend",
            "_not_shortened(condition, {'threshold': max(instance.threshold, min(wanted, latest))})",
            "(condition, {'threshold': max(instance.threshold, min(wanted, latest))})",
        ),
        settings=_EXTENDED_TWICE,
    ),
    # Scale-down and operators
    _mutant(
        "renew-with-a-new-epoch",
        "the renewal of an idle instance raises its epoch",
        expression(
            _TRANSITIONS,
            "_effect",
            "{'threshold': event.until}",
            "{'threshold': event.until, 'epoch': instance.epoch + 1}",
        ),
    ),
    _mutant(
        "renewal-that-comes-late",
        "a delayed renewal cuts a later one short",
        expression(
            _TRANSITIONS,
            "_effect",
            "_not_shortened(replace(alive, not_retired=True), {'threshold': event.until})",
            "(replace(alive, not_retired=True), {'threshold': event.until})",
        ),
    ),
    _mutant(
        "renewal-that-lasts-longer",
        "a delayed renewal lasts longer by its delay, beyond the machine's maximum age",
        statements(
            _SCALE_DOWN,
            "PoolRecords.renew",
            "due = renewals(...)",
            "decided_at = context.clock.now()\n"
            "due = renewals(idle, quota, now=decided_at, idle_time_s=lifetimes.idle_time_s, "
            "max_age_s=lifetimes.max_age_s)",
        ),
        argument(
            _SCALE_DOWN,
            "PoolRecords.renew.one",
            "until=renewal.until",
            "until=renewal.until + (context.clock.now() - decided_at)",
        ),
        settings=_OPERATED,
    ),
    _mutant(
        "quarantine-without-patience",
        "a short quarantine cuts the time of a release whose job still runs",
        expression(_TRANSITIONS, "_quarantine", "max(instance.threshold, until)", "until"),
    ),
    _mutant(
        "quarantined-and-retired",
        "a machine in quarantine is terminated before the quarantine ends",
        statements(_INSTANCE, "decide_retirement", "if instance.is_quarantined(now):\n    ...", ""),
        # The condition of the write checks it once more.
        argument(_TRANSITIONS, "_end", "max_quarantined_until=...", ""),
    ),
    _mutant(
        "drained-and-pooled",
        "a drained instance goes back to the pool after its run",
        statements(_INSTANCE, "decide_retirement", "if instance.retire_reason is not None:\n    ...", ""),
        expression(
            _TRANSITIONS,
            "_pool",
            "instance.retire_reason is not None and not instance.is_quarantined(now)",
            "not instance.epoch",
        ),
    ),
    # Sweeps
    _mutant(
        "sweep-without-created",
        "sweeps skip created instances",
        expression(_SWEEP, "Sweep.run", "context.store.find(LIVE)", "context.store.find(LIVE - {State.CREATED})"),
        expression(
            _SWEEP,
            "ProvisionSweep.settle",
            "instance.state in ASSIGNED",
            "instance.state in ASSIGNED and instance.state != 'created'",
        ),
    ),
    _mutant(
        "expiry-without-margin",
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
        "ended-and-never-released",
        "a run that ends without a release keeps its instances until its maximum runtime",
        expression(_ENDED_RUNS, "EndedRunSweep._check", "waited < self._grace", "waited"),
        settings=_UNRELEASED,
    ),
    _mutant(
        "ended-run-without-grace",
        "a run that has just ended is released before its own release job could come",
        expression(_ENDED_RUNS, "EndedRunSweep._check", "waited < self._grace", "waited < 0 * self._grace"),
        settings=_UNRELEASED,
    ),
    _mutant(
        "ended-run-read-once",
        "a run that was run again in the grace period is released although its new attempt needs the instances",
        expression(
            _ENDED_RUNS,
            "EndedRunSweep._check",
            "current is not None and current.has_ended and current.attempt == ended.attempt",
            "True",
        ),
        settings=_UNRELEASED,
    ),
    _mutant(
        "ended-run-of-any-attempt",
        "the provisions of a newer attempt are released with the ended one",
        expression(
            _ENDED_RUNS,
            "EndedRunSweep._check",
            "current is not None and current.has_ended and current.attempt == ended.attempt",
            "True",
        ),
        expression(
            _ENDED_RUNS,
            "EndedRunSweep._release",
            "not is_committed or provision.attempt > ended.attempt",
            "not is_committed",
        ),
        settings=_UNRELEASED,
    ),
    _mutant(
        "gone-at-first-sight",
        "a machine that is missing from one list counts as gone",
        statements(
            _MACHINE_SWEEP,
            "MachineSweep._close_if_gone",
            "if view is None and not self._is_missing(...):\n    ...",
            "",
        ),
    ),
    _mutant(
        "gone-by-an-old-list",
        "an old list decides on a machine that was launched later",
        statements(
            _MACHINE_SWEEP,
            "MachineSweep._is_missing",
            "grace = ...",
            "listed_at = self._context.clock.now()\ngrace = timedelta(seconds=self._config.lifetimes.missing_after_s)",
        ),
    ),
    _mutant(
        "tombstone-without-grace",
        "a machine without a record gets a tombstone at once",
        expression(
            _MACHINE_SWEEP,
            "MachineSweep._tombstone_if_unrecorded",
            "now - view.launched_at < grace",
            "now - view.launched_at < 0 * grace",
        ),
    ),
    _mutant(
        "confirmed-unseen",
        "a requested termination counts as confirmed",
        statements(
            _MACHINE_SWEEP,
            "MachineSweep._has_ended",
            "if view is not None and view.state is not MachineState.TERMINATED:\n    ...",
            "",
        ),
    ),
    _mutant(
        "closed-before-the-deadline",
        "a sweep releases provisions that are still running",
        expression(
            _SWEEP,
            "ProvisionSweep.run",
            "self._context.clock.now() - margin",
            "self._context.clock.now() + 10 * margin",
        ),
    ),
    _mutant(
        "taken-back-unreleased",
        "a sweep takes instances back and leaves their provision as it is",
        statements(_SWEEP, "ProvisionSweep.settle", "provision = await self._release(provision)", ""),
    ),
    _mutant(
        "taken-back-from-another",
        "a sweep takes back an instance that another provision has claimed since",
        expression(
            _SWEEP,
            "ProvisionSweep.settle",
            "instance.provision_id == provision.provision_id",
            "True",
        ),
    ),
    _mutant(
        "stale-registrations-by-old-records",
        "the sweep of stale registrations reads the records first, then lists the runners",
        statements(
            _SWEEP,
            "Sweep.run",
            "external = await self._list_external()",
            "early = {item.instance_id: item for item in await context.store.find(frozenset(State))}\n"
            "external = await self._list_external()",
        ),
        expression(
            _SWEEP,
            "Sweep.run",
            "registrations.run(external.runners, not_retired)",
            "registrations.run(external.runners, early)",
        ),
        statements(
            _MACHINE_SWEEP,
            "StaleRegistrationSweep.run",
            "records, unreadable = await skip_unreadable(read, self._result.error)",
            "records, (_, unreadable) = live, await skip_unreadable(read, self._result.error)",
        ),
        # A registration without a record is kept while its machine exists and when it is first seen.
        expression(
            _MACHINE_SWEEP,
            "StaleRegistrationSweep._unrecorded_since",
            "parsed is None or parsed[1] in self._existing",
            "parsed is None",
        ),
        expression(
            _MACHINE_SWEEP, "StaleRegistrationSweep._stale_reason", "self._listed_at", "self._context.clock.now()"
        ),
        argument(
            _MACHINE_SWEEP,
            "StaleRegistrationSweep._stale_reason",
            "grace_s=self._config.lifetimes.registration_stale_after_s",
            "grace_s=self._config.lifetimes.stale_registration_grace_s",
        ),
    ),
    _mutant(
        "current-registration-is-stale",
        "the registration of the current assignment counts as stale",
        expression(_POOL_CONFIG, "stale_registration_reason", "epoch < record.epoch", "epoch <= record.epoch"),
    ),
    _mutant(
        "registrations-of-other-pools",
        "a runner of another pool whose name begins alike counts as stale",
        expression(
            _POOL_CONFIG,
            "parse_runner_name",
            "not _EPOCH.fullmatch(epoch) or not is_instance_id(instance_id)",
            "not _EPOCH.fullmatch(epoch)",
        ),
        expression(_MACHINE_SWEEP, "StaleRegistrationSweep.run", "is_instance_id(parsed[1])", "True"),
    ),
    _mutant(
        "stale-registrations-stay",
        "stale registrations are found and not removed",
        statements(
            _MACHINE_SWEEP, "StaleRegistrationSweep._remove", "deletion = await ...", "deletion = Deletion.GONE"
        ),
    ),
    _mutant(
        "announced-once",
        "a message that the queue lost is never sent again",
        expression(_NEXT_STEP, "_in_pool", "now - instance.announced_at >= republish", "False"),
    ),
    _mutant(
        "good-messages-dropped",
        "the sweep of pool messages also drops those of idle instances",
        expression(_SWEEP, "PoolMessageSweep._find_stale", "record.state is not State.IDLE", "True"),
    ),
    _mutant(
        "messages-that-came-back",
        "a message that returned after its visibility timeout counts as its own duplicate",
        statements(
            _SWEEP,
            "PoolMessageSweep._find_stale",
            "valid[message.id, message.epoch] = receive_at",
            "valid[message.id, message.epoch] = inf",
        ),
    ),
    _mutant(
        "duplicates-of-the-unclaimed",
        "a message that comes again while its claim takes long is dropped",
        statements(
            _PICKUP,
            "PickupManager._accept",
            "self._copies.setdefault(...).append(delivery)",
            "self._drop_duplicate(delivery)",
        ),
    ),
    # Agent
    _mutant(
        "start-before-running",
        "the runner is started as soon as it is registered",
        statements(_DECIDE, "_when_assigned", "return _wait(...)", "return _when_running(observation, record)"),
    ),
    _mutant(
        "signal-before-configure",
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
        "the runner is stopped while it is registered, even if it runs a job",
        statements(
            _DECIDE,
            "_when_releasing",
            "if observation.runner.busy:\n    ...",
            "if observation.runner.listening:\n    return AgentStep(action=AgentAction.STOP, reason='released')",
        ),
    ),
    _mutant(
        "failed-reset-is-fine",
        "a machine that could not be reset reports that it is clean",
        statements(
            _LOOP,
            "Agent._act",
            "signal = Signal.UD_REMOVE_REG_REMOVE_RUN_OK if outcome.ok else failed",
            "signal = Signal.UD_REMOVE_REG_REMOVE_RUN_OK",
        ),
    ),
    _mutant(
        "quarantine-unseen",
        "a release that read the record before an operator's quarantine still terminates the instance",
        argument(_TRANSITIONS, "_end", "max_quarantined_until=...", ""),
    ),
    _mutant(
        "agent-without-margin",
        "an agent terminates its machine as soon as its own clock passes the threshold",
        argument(_DECIDE, "next_step", "margin_s=observation.margin_s", "margin_s=0.0"),
    ),
    _mutant(
        "dead-man-not-rearmed",
        "the dead-man timer stays at the first threshold",
        statements(_LOOP, "Expiry.observe", "self._set_dead_man_timer(busy)", ""),
    ),
    # Times, waste and unfinished work
    _mutant(
        "quarantine-cut-by-the-pool",
        "an instance in quarantine that is pooled gets the idle time only",
        expression(
            _TRANSITIONS,
            "_pool",
            "_at_least_quarantine(instance, after(now, event.idle_time_s))",
            "after(now, event.idle_time_s)",
        ),
        settings=_QUARANTINED,
    ),
    _mutant(
        "quarantine-cut-by-a-release",
        "a release ends with its own time, although the instance is in quarantine for longer",
        expression(
            _TRANSITIONS,
            "_release",
            "_at_least_quarantine(instance, after(now, event.release_time_s))",
            "after(now, event.release_time_s)",
        ),
        settings=_QUARANTINED,
    ),
    _mutant(
        "commit-of-the-expired",
        "an instance is committed after its time as claimed or created is up",
        expression(
            _TRANSITIONS,
            "_commit",
            "replace(alive, owner=event.owner)",
            "replace(alive, owner=event.owner, threshold_after=None)",
        ),
        settings=_PAUSED,
    ),
    _mutant(
        "runtime-after-the-deadline",
        "the maximum runtime counts from the provision's deadline, not from the commit",
        expression(
            _TRANSITIONS, "_commit", "after(now, event.max_runtime_s)", "after(instance.threshold, event.max_runtime_s)"
        ),
        settings=_FEW_FAULTS,
    ),
    _mutant(
        "run-deadline-forgotten",
        "a release forgets until when the run's job may go on",
        entry(_TRANSITIONS, "_release", "'run_deadline': instance.deadline(busy=True)", "'run_deadline': None"),
        settings=_FEW_FAULTS,
    ),
    _mutant(
        "extension-at-the-last-moment",
        "a release is extended only when its time is up",
        statements(_NEXT_STEP, "_is_worth_extending", "half = ...", "half = timedelta(0)"),
        settings=_FEW_FAULTS,
    ),
    _mutant(
        "extension-of-a-release",
        "an extension lasts as long as a release, not at least 15 minutes",
        expression(
            _NEXT_STEP,
            "_extension_s",
            "max(lifetimes.release_time_s, MIN_EXTENSION_S)",
            "lifetimes.release_time_s",
        ),
        settings=_FEW_FAULTS,
    ),
    _mutant(
        "uses-not-counted",
        "a use is not counted when the instance is pooled",
        entry(_TRANSITIONS, "_pool", "'uses': instance.uses + 1", "'uses': instance.uses"),
        settings=_FEW_FAULTS,
    ),
    _mutant(
        "one-use-too-many",
        "an instance is pooled although its last use was the last allowed one",
        expression(_INSTANCE, "decide_retirement", "uses >= max_uses", "uses > max_uses"),
        settings=_FEW_FAULTS,
    ),
    _mutant(
        "one-use-too-few",
        "a sweep ends an idle instance that may serve one more run",
        expression(
            _INSTANCE,
            "decide_retirement",
            "instance.uses if instance.state is State.IDLE else instance.uses + 1",
            "instance.uses + 1",
        ),
        settings=_FEW_FAULTS,
    ),
    _mutant(
        "age-ignored",
        "an instance is pooled whatever its age",
        statements(
            _INSTANCE, "decide_retirement", "if (now - instance.created_at).total_seconds() >= max_age_s:\n    ...", ""
        ),
        settings=_AGED,
    ),
    _mutant(
        "half-the-age",
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
        "notice-and-pooled",
        "a machine with a spot notice is pooled",
        argument(_NEXT_STEP, "_after_reset", "notice=report.notice", "notice=''"),
        settings=_NOTICED,
    ),
    _mutant(
        "notice-of-the-idle-ignored",
        "a sweep does not retire machines with a spot notice",
        expression(_NEXT_STEP, "next_step", "_retire_after_notice(instance, report, now=now)", "None"),
        settings=_FEW_FAULTS,
    ),
    _mutant(
        "idle-time-of-a-release",
        "an idle instance gets the release time",
        argument(
            _NEXT_STEP,
            "_after_reset",
            "idle_time_s=policy.lifetimes.idle_time_s",
            "idle_time_s=policy.lifetimes.release_time_s",
        ),
        settings=_FEW_FAULTS,
    ),
    _mutant(
        "deadline-with-a-reserve",
        "a provision's deadline is later by the time for its rollback",
        expression(
            _PROVISION_PLAN,
            "ProvisionLimits.start",
            "timedelta(seconds=timeout_s)",
            "timedelta(seconds=timeout_s + reserve_s)",
        ),
        settings=_FEW_FAULTS,
    ),
    _mutant(
        "impatient-claim",
        "a claimed machine has a few seconds to register",
        statements(
            _SELECTION,
            "Selection._wait_for_registration",
            "timeout_at = ...",
            "timeout_at = self._context.clock.monotonic() + OPEN_CHECK_INTERVAL_S",
        ),
        settings=_FEW_FAULTS,
    ),
    _mutant(
        "surplus-kept-hidden",
        "messages that no worker needs stay hidden",
        statements(_PICKUP, "PickupManager._run_pass", "if surplus:\n    ...", ""),
        settings=_FEW_FAULTS,
    ),
    _mutant(
        "mismatches-kept-hidden",
        "messages that do not match stay hidden after the provision",
        statements(_PICKUP, "PickupManager._make_held_visible", "await self._context.pool.make_visible(...)", ""),
        settings=_FEW_FAULTS,
    ),
    _mutant(
        "one-mismatch-is-enough",
        "a pool whose first messages do not match counts as exhausted",
        expression(_PICKUP, "PickupManager._has_only_known_mismatches", "count >= MAX_RECEIVES", "count >= 1"),
        settings=_FEW_FAULTS,
    ),
    _mutant(
        "short-batch-is-the-end",
        "a pool is exhausted when a receive returns fewer messages than requested",
        expression(_PICKUP, "PickupManager._run_pass", "not batch", "len(batch) < BATCH"),
        settings=_FEW_FAULTS,
    ),
    _mutant(
        "limit-without-the-new",
        "the launched instances do not count for the maximum",
        expression(_CREATION, "Creation._count_within_limit", "live + count <= limit", "live <= limit"),
        settings=_FEW_FAULTS,
    ),
    _mutant(
        "release-without-the-claimed",
        "a release leaves claimed instances to the sweeps",
        expression(
            _NEXT_STEP,
            "leave_holder",
            "instance.state not in {State.CLAIMED, State.RUNNING}",
            "instance.state is not State.RUNNING",
        ),
        settings=_RELEASED_EARLY,
    ),
    _mutant(
        "release-of-the-committed-only",
        "a release leaves the instances of an uncommitted provision to the sweeps",
        statements(_RELEASE, "_instances_of", "if not provision.instance_ids:\n    ...", ""),
        settings=_FEW_FAULTS,
    ),
    _mutant(
        "script-without-its-limit",
        "an agent whose pre-runner script takes long stops its heartbeat",
        statements(_LOOP, "Agent._run_script", "self._watchdog.expect_progress_within(SCRIPT_LIMIT_S)", ""),
        settings=_FEW_FAULTS,
    ),
    _mutant(
        "unreachable-is-failed",
        "an agent gives up on the removal when GitHub is unreachable for some seconds",
        expression(_LOOP, "Agent._remove", "removal is RemovalStatus.FAILED", "True"),
        settings=_HANGING,
    ),
    _mutant(
        "stale-whenever",
        "a heartbeat that is old by the clock is dead, not only the first one",
        argument(
            _SIGNALS, "Pulse.observe", "stale=first and age_s > self.stale_after_s", "stale=age_s > self.dead_after_s"
        ),
        settings=_FEW_FAULTS,
    ),
    # Bugs that the rules about waste found
    _mutant(
        "expiring-and-hidden",
        "the message about an idle instance that is about to expire stays hidden after a failed claim",
        statements(_PICKUP, "PickupManager.hand_back", "self._held.append(delivery.receipt)", ""),
        settings=_FEW_FAULTS,
    ),
    _mutant(
        "unclaimed-and-hidden",
        "the message of a worker that is cancelled before its claim stays hidden",
        statements(_PICKUP, "PickupManager.close", "self._held += sorted(self._unsettled)", ""),
        settings=_FEW_FAULTS,
    ),
    _mutant(
        "closed-by-one-write",
        "a rollback leaves its provision open if one write is lost",
        expression(
            _ROLLBACK, "_close_provision", "retry_write(...)", "context.store.replace_provision(current, after)"
        ),
        settings=_FEW_FAULTS,
    ),
    _mutant(
        "release-over-a-binding",
        "a release of a listening runner overwrites the run of a job that was recorded meanwhile",
        argument(_TRANSITIONS, "_effect", "equals=(*timed.equals, *unbound)", "equals=timed.equals"),
        settings=_SETS,
    ),
    # Runner sets
    _mutant(
        "free-capacity-announced",
        "a poll announces how many more runners the set may have, not its maximum",
        expression(
            _SESSION, "SetSession.poll", "state.runner_set.max", "state.runner_set.max - state.statistics.assigned"
        ),
        settings=_SETS,
    ),
    _mutant(
        "message-of-another-session",
        "a new session continues after the last message of the former one",
        expression(
            _SESSION, "SetSession.open", "before.last_message_id if is_continued else 0", "before.last_message_id"
        ),
        settings=_SETS,
    ),
    _mutant(
        "acknowledged-and-forgotten",
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
        "lease-without-expiry",
        "the lease of a listener that was killed never expires",
        expression(_LEASE, "ListenerLease._is_free", "unchanged_s >= EXPIRES_AFTER_S", "unchanged_s < 0"),
        settings=_LOST_LISTENERS,
    ),
    _mutant(
        "maximum-ignored",
        "a set gets a runner per job, more than its maximum",
        expression(_SUPPLY, "decide_supply", "min(runner_set.max, jobs + window.hot)", "jobs + window.hot"),
        expression(_SUPPLY, "decide_supply", "min(shortfall, runner_set.max - supply)", "shortfall"),
        settings=_SETS,
    ),
    _mutant(
        "own-acquisitions-uncounted",
        "machines that are being acquired do not count as supply",
        expression(
            _SUPPLY,
            "decide_supply",
            "acquiring + sum(map(SUPPLY.__contains__, used))",
            "sum(map(SUPPLY.__contains__, used))",
        ),
        settings=_CALM_SETS,
    ),
    _mutant(
        "returning-machines-uncounted",
        "a machine is launched although one whose job has just ended returns to the pool",
        expression(_SUPPLY, "_expect_return", "will_return and until > now", "False"),
        settings=_CALM_SETS,
    ),
    _mutant(
        "surplus-without-deregistration",
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
        "busy-runner-withdrawn",
        "a runner is released although GitHub refuses to remove its registration because of a job",
        statements(_EQUIPMENT, "Equipment.withdraw", "if deletion is Deletion.BUSY:\n    ...", ""),
        settings=_SETS,
    ),
    _mutant(
        "completed-is-spent",
        "GitHub's message about a completed job ends a machine that still works",
        expression(_SUPPLY, "_classify_running", "machine.is_spent", "machine.is_spent or machine.completed"),
        settings=_SETS,
    ),
    _mutant(
        "release-of-the-unbound",
        "a machine is released after a job that no one knows, as if it had served none",
        expression(_SUPPLY, "_decide_spent", "machine.instance.is_bound", "machine.is_spent"),
        settings=_SETS,
    ),
    _mutant(
        "late-binding-is-trusted",
        "a job that no message has named counts as trusted",
        expression(
            _TRANSITIONS,
            "_bind",
            "event.tier if by_event else Tier.UNTRUSTED",
            "event.tier if by_event else event.set_tier",
        ),
        settings=_SETS,
    ),
    _mutant(
        "fork-by-its-event",
        "a pull request counts as trusted, whatever its head repository is",
        expression(_BINDING, "Binder._trust", "run.head_repository if run else ''", "event.repository"),
        settings=_SETS,
    ),
    _mutant(
        "untrusted-and-reused",
        "a machine of a trusted set that served an untrusted job keeps its tier and is not retired",
        entry(_TRANSITIONS, "_bind", "'tier': tier", "'tier': instance.tier"),
        expression(_TRANSITIONS, "_bind", "tier is not event.set_tier", "not event.set_tier"),
        settings=_SETS,
    ),
    _mutant(
        "configuration-kept-while-bound",
        "the just-in-time configuration stays on the record while a job runs",
        argument(_TRANSITIONS, "_bind", "jit_config=''", ""),
        settings=_SETS,
    ),
    _mutant(
        "listener-before-the-boot",
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
    _mutant(
        "release-before-its-provision",
        "a machine of a set is released, but its provision is not",
        statements(
            _EQUIPMENT,
            "Equipment.release",
            "await self._leave_provision(...)",
            "await self._transition(machine, event, why)",
        ),
        settings=_SETS,
    ),
    _mutant(
        "second-job-of-a-registration",
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
        "strict-with-untrusted-instances",
        "a strict set refuses untrusted jobs on instances that served untrusted ones, not on trusted instances",
        expression(_TRANSITIONS, "_equip", "instance.tier is Tier.TRUSTED", "instance.tier is not Tier.TRUSTED"),
        settings=_CALM_SETS,
    ),
    _mutant(
        "rerun-before-the-end",
        "an interrupted job is run again while its run is in progress",
        statements(_RERUN, "InterruptedJobs._try", "if run is None or not run.has_ended:\n    return False", ""),
        settings=_SPOT_SETS,
    ),
    _mutant(
        "rerun-of-a-rerun",
        "a job that was run again after an interruption is run again after the next one",
        expression(_RERUN, "_is_same", "one.job_id != other.job_id", "one.job_id == other.job_id"),
        settings=_SPOT_SETS,
    ),
)
