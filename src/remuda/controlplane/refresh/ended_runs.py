"""Release of runs that have ended on GitHub, but whose workflow did not release them.

A run releases its instances by a job of its workflow. A workflow without such a job would hold them until its
max-runtime-min is over. So each sweep asks GitHub about the runs that hold instances.

Per sweep it makes at most `MAX_CALLS` calls of GitHub, and about each run at most one per `CHECK_INTERVAL_S`. It asks
only about runs that hold instances.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from math import inf

from remuda.controlplane.refresh.observe import Observed
from remuda.controlplane.refresh.provisions import settle
from remuda.controlplane.refresh.result import RefreshResult, combined, for_each, warned
from remuda.domain.errors import Conflict, NotFound, RemudaError, UserError
from remuda.domain.instance import ASSIGNED, Instance
from remuda.domain.provision import ProvisionEnding, ProvisionStatus, released
from remuda.domain.reporting.warnings import RELEASE_JOB, WarningKind
from remuda.domain.resources import is_repository
from remuda.domain.sweep_record import RunAnswer, SweepRecord, UnreadableRepository
from remuda.domain.timestamps import to_milliseconds
from remuda.ports.github import GitHub, GitHubRun

#: Calls of GitHub per sweep.
MAX_CALLS = 50
#: Seconds between two calls about the same run. Sweeps of the local backend follow each other within seconds.
CHECK_INTERVAL_S = 60.0
#: Seconds after a refusal in which GitHub is not asked about the repository's runs again.
REFUSED_S = 900.0
#: Seconds after the last refusal after which the next one is a new warning.
FORGOTTEN_AFTER_S = 86_400.0


@dataclass(frozen=True, kw_only=True, slots=True)
class HoldingRun:
    """A run with its own provision that holds instances."""

    #: As owner/name in lower case.
    repository: str
    run_id: str
    #: Owner or repository by whose credential GitHub is asked.
    scope: str


async def release_ended_runs(observed: Observed) -> RefreshResult:
    """Mark the provisions of ended runs as released, and take their instances back.

    Example: run 17 ends at 12:00 in its attempt 1, and its workflow has no release job. The sweep at 12:01 records the
    end, and `status` warns. The first sweep after 12:06 reads the run again and releases it. If somebody runs its
    failed jobs again at 12:04, GitHub calls the same run in progress, attempt 2: it keeps its instances.
    """
    github, before = observed.context.github, observed.before
    if github is None:
        # Another process with a credential asks GitHub.
        return RefreshResult(record=SweepRecord(runs=before.runs, unreadable=before.unreadable))
    known = {(item.repository, item.run_id): item for item in before.runs}
    runs = [(run, known.get((run.repository, run.run_id))) for run in _holding_runs(observed.records.values())]
    questions = _Questions(observed, github)
    # The run that GitHub was asked about longest ago comes first.
    in_order = sorted(runs, key=lambda pair: pair[1].asked_at.timestamp() if pair[1] else -inf)
    parts = [await _check(observed, questions, run, answer) for run, answer in in_order]
    return combined([*parts, questions.refusals()])


async def _check(observed: Observed, questions: _Questions, run: HoldingRun, before: RunAnswer | None) -> RefreshResult:
    now = observed.context.clock.now()
    waited = now - before.ended_at if before is not None and before.ended_at is not None else None
    grace = timedelta(seconds=observed.config.lifetimes.ended_run_grace_s)
    if waited is not None and waited < grace:
        return _recorded(before)
    # Asked again, because a re-run keeps the id of the run and may need the instances of an earlier attempt.
    answer, current = await questions.ask(run, before)
    if before is None or waited is None:
        return _recorded(answer)
    if current is None or not current.has_ended or current.attempt != before.ended_attempt:
        return _recorded(answer)
    try:
        return combined([_recorded(answer), await _release(observed, before, waited)])
    except RemudaError as error:
        # For example because a record cannot be parsed: this does not stop the others.
        problem = f"run {run.run_id} of {run.repository} cannot be released: {error.message}"
        return combined([_recorded(answer), RefreshResult(errors=(problem,))])


def _recorded(answer: RunAnswer | None) -> RefreshResult:
    return RefreshResult(record=SweepRecord(runs=() if answer is None else (answer,)))


async def _release(observed: Observed, ended: RunAnswer, waited: timedelta) -> RefreshResult:
    """Release the provisions of the ended attempts. The write fails if another process did it first."""
    context, closed = observed.context, []
    why = f"its workflow run ended in attempt {ended.ended_attempt} and did not release it"
    for provision in await context.store.provisions_of_run(ended.run_id):
        is_committed = provision.status is ProvisionStatus.COMMITTED and not provision.runner_set
        # Of a provision that is still open, its deadline decides soon.
        if not is_committed or provision.attempt > ended.ended_attempt:
            continue
        marked = released(provision, now=context.clock.now(), why=why, ending=ProvisionEnding.UNRELEASED)
        try:
            await context.store.replace_provision(provision, marked)
        except Conflict:
            continue
        context.event_log.record("provision-closed", why, run_id=ended.run_id)
        closed.append(marked)
    name = f"run {ended.run_id} of {ended.repository}"
    taken = await for_each(closed, lambda item: settle(context, observed.config, item), name=lambda _: name)
    held = sum(len(item.instance_ids) for item in closed)
    if not held:
        return taken
    count = f"{held} instance{'' if held == 1 else 's'}"
    when = f"ended {waited.total_seconds() / 60:.0f} min ago"
    sentence = f"{name} {when} and was not released: its {count} return to the pool; {RELEASE_JOB}"
    return combined([taken, warned(WarningKind.RUN_UNRELEASED, sentence)])


class _Questions:
    """Asks GitHub about runs, within the limits of one sweep."""

    def __init__(self, observed: Observed, github: GitHub) -> None:
        self._context = observed.context
        self._github = github
        self._known = {item.repository: item for item in observed.before.unreadable}
        self._refused = dict(self._known)
        self._calls_left = MAX_CALLS

    async def ask(self, run: HoldingRun, before: RunAnswer | None) -> tuple[RunAnswer | None, GitHubRun | None]:
        """What is known about a run now, and the run if GitHub has told it: None if it has not changed."""
        now = self._context.clock.now()
        is_early = before is not None and now - before.asked_at < timedelta(seconds=CHECK_INTERVAL_S)
        if is_early or self._calls_left <= 0 or self._age_of_refusal(run.repository) < REFUSED_S:
            return before, None
        self._calls_left -= 1
        asked = RunAnswer(repository=run.repository, run_id=run.run_id, asked_at=to_milliseconds(now))
        unchanged = replace(before, asked_at=asked.asked_at) if before is not None else asked
        try:
            found = await self._github.get_run(run.scope, run.repository, int(run.run_id), etag=unchanged.etag)
        except NotFound:
            # Deleted, or the credential does not see the repository: no proof that the run has ended.
            return asked, None
        except UserError as error:
            fix = f"; {error.fix}" if error.fix else ""
            self._refused[run.repository] = UnreadableRepository(
                repository=run.repository, reason=f"{error.message}{fix}", at=to_milliseconds(now)
            )
            return unchanged, None
        except RemudaError as error:
            self._context.event_log.record("run-unread", error.message, run_id=run.run_id)
            # It may have been the first of many timeouts. The next sweep begins with another run.
            self._calls_left = 0
            return unchanged, None
        self._refused.pop(run.repository, None)
        if found is None:
            return unchanged, None
        return _answer(asked, found, before, now=self._context.clock.now()), found

    def _age_of_refusal(self, repository: str) -> float:
        refusal = self._refused.get(repository)
        return inf if refusal is None else (self._context.clock.now() - refusal.at).total_seconds()

    def refusals(self) -> RefreshResult:
        """Repositories whose runs the credential may not read, with one warning for as long as that lasts."""
        lasting = [
            item for name, item in sorted(self._refused.items()) if self._age_of_refusal(name) < FORGOTTEN_AFTER_S
        ]
        warnings = [
            warned(
                WarningKind.RUN_UNRELEASED,
                f"whether the runs of {item.repository} have ended cannot be read, so runs without a release keep "
                f"their instances until max-runtime-min: {item.reason}",
            )
            for item in lasting
            if item.repository not in self._known
        ]
        return combined([*warnings, RefreshResult(record=SweepRecord(unreadable=tuple(lasting)))])


def _answer(asked: RunAnswer, found: GitHubRun, before: RunAnswer | None, *, now: datetime) -> RunAnswer:
    if not found.has_ended:
        return replace(asked, etag=found.etag)
    if not found.attempt:
        return asked
    # Not since the sweep began: it may have taken long, and the run may have ended meanwhile.
    is_known = before is not None and before.ended_attempt == found.attempt
    since = before.ended_at if before and is_known else to_milliseconds(now)
    return replace(asked, ended_attempt=found.attempt, ended_at=since)


def _holding_runs(records: Iterable[Instance]) -> Sequence[HoldingRun]:
    """Runs of GitHub, whose ids are numbers, with instances of their own. Those of runner sets end with their job."""
    found: dict[HoldingRun, None] = {}
    for item in records:
        repository = item.assignment.repository.lower() if item.assignment is not None else ""
        is_held = item.state in ASSIGNED and not item.runner_set
        if is_held and is_repository(repository) and item.run_id.isdecimal() and item.run_id.isascii():
            found[HoldingRun(repository=repository, run_id=item.run_id, scope=item.scope)] = None
    return list(found)
