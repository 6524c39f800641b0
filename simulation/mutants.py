"""The bugs that are planted, one mutant each."""

from __future__ import annotations

from simulation.campaign import Settings
from simulation.faults import Fault
from simulation.run_mutant import Mutant, Patch

_TRANSITIONS = "domain/transitions.py"
_SIGNALS = "domain/signals.py"
_RESOURCES = "domain/resources.py"
_SELECTION = "controlplane/provision/selection.py"
_PICKUP = "controlplane/provision/pickup.py"
_HOLDINGS = "controlplane/provision/rollback.py"
_COMMIT = "controlplane/provision/commit.py"
_PROVISION = "controlplane/provision/__init__.py"
_CONTEXT = "controlplane/context.py"
_RELEASE = "controlplane/release/__init__.py"
_HANDSHAKE = "controlplane/release/advance.py"
_SWEEP = "controlplane/refresh/sweep.py"
_MACHINES = "controlplane/refresh/machines.py"
_PROVISIONS = "controlplane/refresh/provisions.py"
_GHOSTS = "controlplane/refresh/stale_registrations.py"
_HINTS = "controlplane/refresh/pool_messages.py"
_SCALE_DOWN = "controlplane/scale_down/pool.py"
_LIFECYCLE = "agent/decide.py"
_LIFETIME = "agent/expiry.py"
_LOOP = "agent/loop.py"

#: Operators at work beside commands that stand still.
_OPERATED = Settings(
    hours=0.25, instances=5, faults=frozenset({Fault.DRAIN, Fault.QUARANTINE, Fault.PAUSE, Fault.SLOW_CALL})
)


def _mutant(name: str, bug: str, *patches: tuple[str, str, str], world: Settings | None = None) -> Mutant:
    return Mutant(name=name, bug=bug, patches=tuple(Patch(*patch) for patch in patches), world=world)


MUTANTS: tuple[Mutant, ...] = (
    # Claims
    _mutant(
        "claim-without-epoch",
        "a claim does not look at the epoch: a stale message claims",
        (
            _TRANSITIONS,
            "            and record.epoch == self.epoch\n",
            "            and (record.epoch == self.epoch or self.state is State.IDLE)\n",
        ),
    ),
    _mutant(
        "claim-keeps-epoch",
        "a claim does not raise the epoch",
        (_TRANSITIONS, '        "epoch": instance.epoch + 1,\n', '        "epoch": instance.epoch,\n'),
    ),
    _mutant(
        "claim-of-the-expiring",
        "a claim does not look at the threshold",
        (_TRANSITIONS, "        threshold_after=now + timedelta(seconds=event.margin_s),\n", ""),
    ),
    _mutant(
        "claim-of-the-retired",
        "a claim takes an instance that is to be retired",
        (
            _TRANSITIONS,
            "        not_retired=True,\n        tiers=tiers,\n",
            "        tiers=tiers,\n",
        ),
    ),
    _mutant(
        "claim-across-tiers",
        "a run gets an instance of another trust tier",
        (_RESOURCES, "    if message.tier not in request.reuse.tiers(request.tier):\n", "    if not request.tier:\n"),
        (_TRANSITIONS, "    if instance.tier not in tiers:\n", "    if not event.tier:\n"),
        (_TRANSITIONS, "        tiers=tiers,\n", ""),
    ),
    _mutant(
        "claim-across-repositories",
        "a claim forgets to look at the repository that a machine has served",
        (_RESOURCES, "    if request.reuse is Reuse.SAME_REPO and message", "    if request.reuse is None and message"),
        (_TRANSITIONS, "    if event.reuse is Reuse.SAME_REPO and not alone:\n", "    if event.reuse is None:\n"),
    ),
    _mutant(
        "repository-of-the-last-run",
        "a claim writes down the run's repository as the only one, whatever the machine has served before",
        (_TRANSITIONS, '        "repository": alone,\n', '        "repository": event.repository,\n'),
    ),
    _mutant(
        "tier-that-rises",
        "with reuse `always` a machine of the lower tier is given to a run of the higher one",
        (
            _RESOURCES,
            "        if self is Reuse.ALWAYS and tier is Tier.UNTRUSTED:\n",
            "        if self is Reuse.ALWAYS:\n",
        ),
    ),
    _mutant(
        "tier-that-stays",
        "a machine that served an untrusted run is trusted as before",
        (_TRANSITIONS, '        "tier": event.tier,\n', '        "tier": instance.tier,\n'),
    ),
    _mutant(
        "ephemeral-in-the-pool",
        "a machine for one job is not retired from its birth on, and is pooled",
        (_SELECTION, "            return EPHEMERAL\n", '            return ""\n'),
    ),
    _mutant(
        "jit-kept-on-the-record",
        "a configuration made just in time stays on the record after its step",
        (_TRANSITIONS, 'credential=credential, jit_config="")', "credential=credential)"),
    ),
    _mutant(
        "spent-is-failed",
        "a listener that served its one job is started again, and counts as one that failed",
        (_LIFECYCLE, "    if view.runner.spent:\n", "    if view.runner.spent is None:\n"),
    ),
    _mutant(
        "claim-under-the-old-name",
        "the runner's name carries the epoch before the claim",
        (
            _SELECTION,
            "assignment=terms.assignment(message.id, message.epoch + 1),",
            "assignment=terms.assignment(message.id, message.epoch),",
        ),
    ),
    _mutant(
        "delete-before-claim",
        "a message is deleted whatever becomes of its claim",
        (_SELECTION, "        hoped_for = change", "        self._pickup.used(delivery)\n        hoped_for = change"),
    ),
    _mutant(
        "delete-what-expires",
        "a message is deleted although its instance is idle and may be renewed",
        (
            _SELECTION,
            (
                "            if not _is_still_idle(conflict.current, message):\n"
                "                self._pickup.used(delivery)\n"
            ),
            "            self._pickup.used(delivery)\n",
        ),
    ),
    _mutant(
        "adopt-a-sibling",
        "after a refused write the record counts as ours when state and epoch look so",
        (
            _CONTEXT,
            "    return replace(current, **change.sets) == current\n",
            '    return (current.state, current.epoch) == (change.sets.get("state"), change.sets.get("epoch"))\n',
        ),
    ),
    _mutant(
        "holdings-by-instance",
        "a worker that loses a race makes its provision forget what another worker claimed",
        (
            _HOLDINGS,
            "        self._held[instance.instance_id, instance.epoch] = Held(",
            "        self._held[instance.instance_id, 0] = Held(",
        ),
        (
            _HOLDINGS,
            "        self._held.pop((instance.instance_id, instance.epoch), None)\n",
            "        self._held.pop((instance.instance_id, 0), None)\n",
        ),
    ),
    # Provision
    _mutant(
        "launch-before-intent",
        "machines are launched before the provision is written",
        (_PROVISION, "    await _intend(context, terms.provision)\n", ""),
        (
            _PROVISION,
            '        recorder.done("instances")\n',
            '        recorder.done("instances")\n        await _intend(context, terms.provision)\n',
        ),
    ),
    _mutant(
        "no-rollback",
        "a provision that fails gives nothing back",
        (
            _PROVISION,
            "        await _undo(context, terms, holdings, why=why, course=recorder.course(error=why))\n",
            "",
        ),
    ),
    _mutant(
        "rollback-leaves-it-open",
        "a provision that fails does not close its record",
        (_HOLDINGS, "            await _close(context, provision, why=why, course=course)\n", ""),
    ),
    _mutant(
        "success-after-release",
        "a provision that was released meanwhile says that it succeeded",
        (_COMMIT, "            if conflict.current == after:\n                break\n", "            break\n"),
    ),
    _mutant(
        "commit-point-first",
        "the provision is committed before its instances run",
        (
            _COMMIT,
            "    running: list[Instance] = []\n",
            (
                "    early = tuple(item.instance.instance_id for item in ready)\n"
                "    await _record(context, provision, committed(provision, early, deadline=provision.deadline))\n"
                "    running: list[Instance] = []\n"
            ),
        ),
        (
            _COMMIT,
            (
                "    await _record(context, provision, "
                "committed(provision, ids, deadline=deadline, course=recorder.course()))\n"
            ),
            "",
        ),
    ),
    _mutant(
        "commit-keeps-the-credential",
        "the registration token stays on the record while jobs run",
        (
            _TRANSITIONS,
            (
                '        "threshold": after(now, event.max_runtime_s),\n'
                '        "assignment": _with_credential(instance, None),\n'
            ),
            '        "threshold": after(now, event.max_runtime_s),\n',
        ),
    ),
    _mutant(
        "token-in-the-event_log",
        "a registration token is told to the event_log",
        (
            _SELECTION,
            "            change.entry.why,\n",
            '            f"with {terms.registration.token}",\n',
        ),
    ),
    _mutant(
        "terminate-before-the-lock",
        "a rollback ends a machine before its record is locked",
        (
            _HOLDINGS,
            "    now = context.clock.now()\n    stone = replace(",
            (
                "    await context.compute.terminate([instance.instance_id])\n"
                "    now = context.clock.now()\n    stone = replace("
            ),
        ),
    ),
    _mutant(
        "birth-over-a-tombstone",
        "a record is created although there is one",
        (
            _TRANSITIONS,
            "            return record is None and self.state is None\n",
            "            return self.state is None\n",
        ),
    ),
    # Signals
    _mutant(
        "signals-of-any-epoch",
        "a signal of an earlier epoch counts",
        (_SIGNALS, " or report.epoch != epoch:", " or report.epoch > epoch:"),
    ),
    _mutant(
        "pool-before-the-reset",
        "an instance is pooled when it is deregistered, before it is reset",
        (
            _SIGNALS,
            "    return _verdict(report, epoch, Signal.UD_REMOVE_REG_REMOVE_RUN_OK, _REMOVAL_FAILURES)\n",
            "    return _verdict(report, epoch, Signal.UD_REMOVE_REG_OK, _REMOVAL_FAILURES)\n",
        ),
    ),
    _mutant(
        "signals-fall-back",
        "a late signal overwrites a later one",
        (_SIGNALS, "        return (epoch, signal.rank) >= (self.epoch, self.rank)\n", "        return True\n"),
    ),
    # Release
    _mutant(
        "release-without-attempt",
        "a release takes the machines of a later attempt too",
        (_RELEASE, " if item.attempt <= attempt]", "]"),
    ),
    _mutant(
        "release-of-another-assignment",
        "a release takes an instance that has another assignment by now",
        (
            _RELEASE,
            "            if instance.provision_id not in provision_ids:\n",
            "            if not provision_ids:\n",
        ),
    ),
    _mutant(
        "release-without-mark",
        "a release takes the machines and does not mark the provision",
        (
            _RELEASE,
            "                await context.store.replace_provision(provision, after)\n",
            "                await context.store.get_provision(provision.run_id, provision.provision_id)\n",
        ),
    ),
    _mutant(
        "flag-before-message",
        "an instance counts as announced before the pool is told",
        (
            _HANDSHAKE,
            (
                "    try:\n        await context.pool.send([instance.message() for instance in idle])\n"
                "    except RemudaError as error:\n        return [error]\n\n"
            ),
            "",
        ),
        (
            _HANDSHAKE,
            "    results = await each(idle, flag)\n",
            (
                "    results = await each(idle, flag)\n"
                "    await context.pool.send([instance.message() for instance in idle])\n"
            ),
        ),
    ),
    _mutant(
        "credential-with-a-new-epoch",
        "the renewal of a credential raises the epoch",
        (
            _TRANSITIONS,
            '            return alive, {"assignment": _with_credential(instance, event.credential)}\n',
            (
                '            return alive, {"assignment": _with_credential(instance, event.credential), '
                '"epoch": instance.epoch + 1}\n'
            ),
        ),
    ),
    _mutant(
        "extension-without-end",
        "a release is extended beyond its run's deadline",
        (
            _TRANSITIONS,
            '    return {"threshold": max(instance.threshold, min(wanted, latest))}\n',
            '    return {"threshold": max(instance.threshold, wanted)}\n',
        ),
    ),
    # Scale-down and operators
    _mutant(
        "renew-with-a-new-epoch",
        "the renewal of an idle instance raises its epoch",
        (
            _TRANSITIONS,
            'threshold_at_or_before=event.until), {"threshold": event.until}\n',
            'threshold_at_or_before=event.until), {"threshold": event.until, "epoch": instance.epoch + 1}\n',
        ),
    ),
    _mutant(
        "renewal-that-comes-late",
        "a renewal that was held up cuts a later one short",
        (
            _TRANSITIONS,
            "replace(alive, not_retired=True, threshold_at_or_before=event.until)",
            "replace(alive, not_retired=True)",
        ),
    ),
    _mutant(
        "renewal-that-lasts-longer",
        "a renewal that was held up lasts as much longer, beyond the machine's greatest age",
        (
            _SCALE_DOWN,
            "        due = renewals(\n",
            "        decided_at = context.clock.now()\n        due = renewals(\n",
        ),
        (_SCALE_DOWN, "until=renewal.until", "until=renewal.until + (context.clock.now() - decided_at)"),
        world=_OPERATED,
    ),
    _mutant(
        "quarantine-without-patience",
        "a short quarantine cuts the time of a release whose job still runs",
        (_TRANSITIONS, '"threshold": max(instance.threshold, until)}', '"threshold": until}'),
    ),
    _mutant(
        "quarantined-and-retired",
        "a machine in quarantine is ended before anybody had a look",
        ("domain/instance.py", '    if instance.is_quarantined(now):\n        return ""\n', ""),
        # The write that ends it looks once more.
        (
            _TRANSITIONS,
            "max_quarantined_until=now if _spares_quarantine(instance, event) else None",
            "max_quarantined_until=None",
        ),
    ),
    _mutant(
        "drained-and-pooled",
        "a drained instance goes back to the pool after its run",
        ("domain/instance.py", "    if instance.retire:\n        return instance.retire\n", ""),
        (
            _TRANSITIONS,
            "    if instance.retire and not instance.is_quarantined(now):\n",
            "    if not instance.epoch:\n",
        ),
    ),
    # Sweeps
    _mutant(
        "sweep-without-created",
        "sweeps do not look at created instances",
        (
            _SWEEP,
            "for item in await context.store.find(LIVE)}",
            "for item in await context.store.find(LIVE - {State.CREATED})}",
        ),
        (
            _PROVISIONS,
            "provision.provision_id and instance.state in ASSIGNED\n",
            "provision.provision_id and instance.state in ASSIGNED - {State.CREATED}\n",
        ),
    ),
    _mutant(
        "expiry-without-margin",
        "what expires is ended as soon as this process's clock says so",
        (
            _SWEEP,
            "if expired(item.threshold, now=now, margin_s=margin_s)]",
            "if expired(item.threshold, now=now, margin_s=0.0)]",
        ),
        (_SWEEP, "End(cause=Cause.EXPIRED, margin_s=margin_s)", "End(cause=Cause.EXPIRED)"),
    ),
    _mutant(
        "gone-at-first-sight",
        "a machine that a list does not show is gone",
        (_MACHINES, "        if view is None and not self._is_missing(instance, listed_at):\n            return\n", ""),
    ),
    _mutant(
        "gone-by-an-old-list",
        "a list that was made long ago decides on a machine that was launched since",
        (
            _MACHINES,
            "        grace = timedelta(seconds=self._config.lifetimes.missing_after_s)\n",
            (
                "        listed_at = self._context.clock.now()\n"
                "        grace = timedelta(seconds=self._config.lifetimes.missing_after_s)\n"
            ),
        ),
    ),
    _mutant(
        "buried-without-grace",
        "a machine without a record is buried at once",
        (
            _MACHINES,
            "        if view.state in OVER or now - view.launched_at < grace:\n",
            "        if view.state in OVER or now - view.launched_at < 0 * grace:\n",
        ),
    ),
    _mutant(
        "confirmed-unseen",
        "an end that was asked for counts as confirmed",
        (
            _MACHINES,
            "        if view is not None and view.state is not MachineState.TERMINATED:\n            return False\n",
            "",
        ),
    ),
    _mutant(
        "closed-before-the-deadline",
        "a sweep releases provisions that are still at work",
        (
            _PROVISIONS,
            "unsettled_provisions(self._context.clock.now() - margin)",
            "unsettled_provisions(self._context.clock.now() + 10 * margin)",
        ),
    ),
    _mutant(
        "taken-back-unreleased",
        "a sweep takes instances back and leaves their provision as it is",
        (
            _PROVISIONS,
            "            provision = await self._release(provision)\n",
            "            pass\n",
        ),
    ),
    _mutant(
        "taken-back-from-another",
        "a sweep takes back an instance that another provision has claimed since",
        (
            _PROVISIONS,
            "            if instance.provision_id == provision.provision_id and instance.state in ASSIGNED\n",
            "            if instance.state in ASSIGNED\n",
        ),
    ),
    _mutant(
        "ghosts-by-old-records",
        "the ghost sweep reads the records first, then lists the runners",
        (
            _SWEEP,
            "        outside = await self._look_outside()\n",
            (
                "        early = {item.instance_id: item for item in await context.store.find(frozenset(State))}\n"
                "        outside = await self._look_outside()\n"
            ),
        ),
        (_SWEEP, "lambda: ghosts.run(outside.runners, untouched))", "lambda: ghosts.run(outside.runners, early))"),
        (
            _GHOSTS,
            "        records, unreadable = await readable(read, self._tally.error)\n",
            "        records, (_, unreadable) = live, await readable(read, self._tally.error)\n",
        ),
        # One without a record is no ghost while its machine stands there, nor at first sight.
        (_GHOSTS, "        if parsed is None or parsed[1] in self._standing:\n", "        if parsed is None:\n"),
        (_GHOSTS, "            now=self._listed_at,\n", "            now=self._context.clock.now(),\n"),
        (_GHOSTS, "lifetimes.ghost_after_s", "lifetimes.ghost_grace_s"),
    ),
    _mutant(
        "ghosts-of-the-present",
        "the registration of the present assignment counts as a ghost",
        ("domain/ghosts.py", "    if epoch < record.epoch:\n", "    if epoch <= record.epoch:\n"),
    ),
    _mutant(
        "ghosts-of-other-pools",
        "a runner of another pool whose name begins alike counts as a ghost",
        (
            "domain/pool_config.py",
            "    if not _EPOCH.fullmatch(epoch) or not is_instance_id(instance_id):\n",
            "    if not _EPOCH.fullmatch(epoch):\n",
        ),
        (_GHOSTS, "            and is_instance_id(parsed[1])\n", ""),
    ),
    _mutant(
        "ghosts-stay",
        "ghost registrations are found and not removed",
        (
            _GHOSTS,
            "        deletion = await github.delete_runner(scope, runner.runner_id)\n",
            "        deletion = Deletion.GONE\n",
        ),
    ),
    _mutant(
        "announced-once",
        "an announcement that the queue lost is never repeated",
        (
            _SWEEP,
            "        return age >= timedelta(seconds=self._config.lifetimes.reannounce_s)\n",
            "        return False\n",
        ),
    ),
    _mutant(
        "good-hints-dropped",
        "the sweep of hints drops those of idle instances too",
        (
            _HINTS,
            "                or record.state is not State.IDLE\n",
            "                or True\n",
        ),
    ),
    _mutant(
        "hints-that-came-back",
        "a hint that came back after its visibility counts as its own duplicate",
        (
            _HINTS,
            "                seen[message.id, message.epoch] = asked_at\n",
            "                seen[message.id, message.epoch] = inf\n",
        ),
    ),
    _mutant(
        "duplicates-of-the-unclaimed",
        "a message that comes again while its claim takes long is dropped",
        (
            _PICKUP,
            "            self._again.setdefault((message.id, message.epoch), []).append(delivery)\n",
            "            self._drop_duplicate(delivery)\n",
        ),
    ),
    # Agent
    _mutant(
        "start-before-running",
        "the runner is started as soon as it is registered",
        (
            _LIFECYCLE,
            '        return _wait("registered; the runner starts when the record says running")\n',
            "        return _run(view, record)\n",
        ),
    ),
    _mutant(
        "signal-before-configure",
        "the agent signals the registration before it is made",
        (
            _LOOP,
            "            started = self._clock.monotonic()\n            outcome = await self._runner.configure",
            (
                "            started = self._clock.monotonic()\n"
                '            await self._signal(record, Signal.UD_REG_OK, "soon")\n'
                "            outcome = await self._runner.configure"
            ),
        ),
    ),
    _mutant(
        "stop-before-removal",
        "the runner is stopped while it is registered, whatever it does",
        (
            _LIFECYCLE,
            "    if view.runner.busy:\n        return _wait(",
            (
                "    if view.runner.listening:\n"
                '        return Step(do=Do.STOP, why="released")\n'
                "    if view.runner.busy:\n        return _wait("
            ),
        ),
    ),
    _mutant(
        "failed-reset-is-fine",
        "a machine that could not be reset says that it is clean",
        (
            _LOOP,
            "            signal = Signal.UD_REMOVE_REG_REMOVE_RUN_OK if outcome.ok else failed\n",
            "            signal = Signal.UD_REMOVE_REG_REMOVE_RUN_OK if outcome else failed\n",
        ),
    ),
    _mutant(
        "quarantine-unseen",
        "a release that read the record before an operator's quarantine ends it all the same",
        (
            _TRANSITIONS,
            "max_quarantined_until=now if _spares_quarantine(instance, event) else None",
            "max_quarantined_until=None",
        ),
    ),
    _mutant(
        "agent-without-margin",
        "an agent ends its machine as soon as its own clock says so",
        (
            _LIFECYCLE,
            "    if expired(record.threshold, now=view.now, margin_s=view.margin_s):\n",
            "    if expired(record.threshold, now=view.now, margin_s=0.0):\n",
        ),
    ),
    _mutant(
        "dead-man-not-rearmed",
        "the dead-man timer stays at the first threshold",
        (
            _LIFETIME,
            "        self._arm(record.threshold)\n        self._machine.save",
            "        self._machine.save",
        ),
    ),
)
