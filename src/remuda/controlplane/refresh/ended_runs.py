"""Release of runs that have ended on GitHub, but whose workflow did not release them.

A run releases its instances by a job of its workflow. A workflow without such a job would hold them until its
max-runtime-min is over. So each sweep asks GitHub about the runs that hold instances.

Per sweep it makes at most `MAX_CALLS` calls of GitHub, and about each run at most one per `CHECK_INTERVAL_S`. It asks
only about runs that hold instances.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import timedelta
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

#: Repository as owner/name in lower case, and run id.
RunKey = tuple[str, str]


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
    scopes = _holding_runs(observed.records.values())
    # The run that GitHub was asked about longest ago comes first.
    runs = sorted(
        (known.get(key) or RunAnswer(repository=key[0], run_id=key[1]) for key in scopes),
        key=lambda item: item.asked_at.timestamp() if item.asked_at else -inf,
    )
    questions = _Questions(observed, github, scopes)
    parts = [await _check(observed, questions, run) for run in runs]
    return combined([*parts, questions.refusals()])


async def _check(observed: Observed, questions: _Questions, before: RunAnswer) -> RefreshResult:
    grace = timedelta(seconds=observed.config.lifetimes.ended_run_grace_s)
    waited = observed.context.clock.now() - before.ended_at if before.ended_at is not None else None
    if waited is not None and waited < grace:
        return RefreshResult(record=SweepRecord(runs=(before,)))
    # Asked again, because a re-run keeps the id of the run and may need the instances of an earlier attempt.
    answer, current = await questions.ask(before)
    asked = RefreshResult(record=SweepRecord(runs=(answer,)))
    if waited is None or current is None or not current.has_ended or current.attempt != before.ended_attempt:
        return asked
    try:
        return combined([asked, await _release(observed, before, waited)])
    except RemudaError as error:
        # For example because a record cannot be parsed: this does not stop the others.
        problem = f"run {before.run_id} of {before.repository} cannot be released: {error.message}"
        return combined([asked, RefreshResult(errors=(problem,))])


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
    problem = f"{name} cannot be released"
    taken = await for_each(closed, lambda item: settle(context, observed.config, item), name=lambda _: problem)
    held = sum(len(item.instance_ids) for item in closed)
    if not held:
        return taken
    count = f"{held} instance{'' if held == 1 else 's'}"
    when = f"ended {waited.total_seconds() / 60:.0f} min ago"
    sentence = f"{name} {when} and was not released: its {count} return to the pool; {RELEASE_JOB}"
    return combined([taken, warned(WarningKind.RUN_UNRELEASED, sentence)])


class _Questions:
    """Asks GitHub about runs, within the limits of one sweep."""

    def __init__(self, observed: Observed, github: GitHub, scopes: Mapping[RunKey, str]) -> None:
        self._context = observed.context
        self._github = github
        self._scopes = scopes
        self._known = {item.repository: item for item in observed.before.unreadable}
        self._refused = dict(self._known)
        self._calls_left = MAX_CALLS

    async def ask(self, before: RunAnswer) -> tuple[RunAnswer, GitHubRun | None]:
        """What is known about a run now, and the run itself if GitHub has told it."""
        now, repository = self._context.clock.now(), before.repository
        is_early = before.asked_at is not None and now - before.asked_at < timedelta(seconds=CHECK_INTERVAL_S)
        if is_early or self._calls_left <= 0 or self._age_of_refusal(repository) < REFUSED_S:
            return before, None
        self._calls_left -= 1
        unchanged = replace(before, asked_at=to_milliseconds(now))
        not_ended = replace(unchanged, etag="", ended_attempt=0, ended_at=None)
        scope = self._scopes[repository, before.run_id]
        try:
            found = await self._github.get_run(scope, repository, int(before.run_id), etag=before.etag)
        except NotFound:
            # Deleted, or the credential does not see the repository: no proof that the run has ended.
            return not_ended, None
        except UserError as error:
            self._refused[repository] = UnreadableRepository.after(error, repository, now=now)
            return unchanged, None
        except RemudaError as error:
            self._context.event_log.record("run-unread", error.message, run_id=before.run_id)
            # It may have been the first of many timeouts. The next sweep begins with another run.
            self._calls_left = 0
            return unchanged, None
        self._refused.pop(repository, None)
        if found is None:
            return unchanged, None
        if not found.has_ended or not found.attempt:
            return replace(not_ended, etag="" if found.has_ended else found.etag), found
        # Not since the sweep began: it may have taken long, and the run may have ended meanwhile.
        since = before.ended_at if before.ended_attempt == found.attempt else to_milliseconds(self._context.clock.now())
        return replace(not_ended, ended_attempt=found.attempt, ended_at=since), found

    def _age_of_refusal(self, repository: str) -> float:
        refusal = self._refused.get(repository)
        return inf if refusal is None else (self._context.clock.now() - refusal.at).total_seconds()

    def refusals(self) -> RefreshResult:
        """Repositories whose runs the credential may not read, with one warning for as long as that lasts."""
        refused = [self._refused[name] for name in sorted(self._refused)]
        lasting = [item for item in refused if self._age_of_refusal(item.repository) < FORGOTTEN_AFTER_S]
        problem = "have ended cannot be read, so runs without a release keep their instances until max-runtime-min"
        warnings = [
            warned(WarningKind.RUN_UNRELEASED, f"whether the runs of {item.repository} {problem}: {item.reason}")
            for item in lasting
            if item.repository not in self._known
        ]
        return combined([*warnings, RefreshResult(record=SweepRecord(unreadable=tuple(lasting)))])


def _holding_runs(records: Iterable[Instance]) -> dict[RunKey, str]:
    """The scope of each run that holds instances of its own, by whose credential GitHub is asked.

    The ids of GitHub's runs are numbers. Runs of runner sets end with their job.
    """
    found: dict[RunKey, str] = {}
    for item in records:
        repository = item.assignment.repository.lower() if item.assignment is not None else ""
        is_held = item.state in ASSIGNED and not item.runner_set
        if is_held and is_repository(repository) and item.run_id.isdecimal() and item.run_id.isascii():
            found[repository, item.run_id] = item.scope
    return found
