"""Release of runs that have ended on GitHub, but whose workflow did not release them.

Per sweep it makes at most `MAX_CALLS` calls of GitHub, and about each run at most one per `CHECK_INTERVAL_S`. It asks
only about runs that hold instances.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import inf

from remuda.controlplane.context import Context
from remuda.controlplane.refresh.machines import FirstSeen, PartialSweep
from remuda.controlplane.refresh.result import RefreshResultBuilder
from remuda.domain.errors import Conflict, NotFound, RemudaError, UserError
from remuda.domain.instance import ASSIGNED, Instance
from remuda.domain.pool_config import PoolConfig
from remuda.domain.provision import Provision, ProvisionEnding, ProvisionStatus, released
from remuda.domain.reporting.ended_runs import (
    AskedRun,
    EndedRun,
    UnreadableRepository,
    describe_unreleased,
    is_about_runs,
)
from remuda.domain.reporting.warnings import WarningKind
from remuda.domain.resources import is_repository
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


class EndedRunSweep(PartialSweep):
    """Marks the provisions of ended runs as released and takes their instances back.

    Example: run 17 ends at 12:00 in its attempt 1, and its workflow has no release job. The sweep at 12:01 records the
    end, and `status` warns. The first sweep after 12:06 reads the run again and releases it. If somebody runs its
    failed jobs again at 12:04, GitHub calls the same run in progress, attempt 2: it keeps its instances.
    """

    def __init__(
        self,
        context: Context,
        config: PoolConfig,
        result: RefreshResultBuilder,
        first_seen: FirstSeen,
        *,
        take_back: Callable[[Provision], Awaitable[None]],
    ) -> None:
        """`take_back` releases the instances of a provision that is marked as released."""
        super().__init__(context, config, result, first_seen)
        self._take_back = take_back
        self._grace = timedelta(seconds=config.lifetimes.ended_run_grace_s)
        self._ended = {(item.repository, item.run_id): item for item in EndedRun.find(first_seen.known)}
        self._asked = {
            (item.repository, item.run_id): (item.etag, at) for item, at in AskedRun.find(first_seen.known).items()
        }
        #: By repository, the last refusal and its time.
        self._refused = {
            item.repository: (item, at) for item, at in UnreadableRepository.find(first_seen.known).items()
        }
        self._calls_left = MAX_CALLS

    async def run(self, records: Mapping[str, Instance]) -> None:
        github = self._context.github
        if github is None:
            # Another process with a credential asks GitHub.
            for anomaly in self._first_seen.known:
                if is_about_runs(anomaly):
                    self._first_seen.keep(anomaly)
            return
        for run in sorted(_holding_runs(records.values()), key=self._asked_at):
            await self._check(github, run)
        self._remember_refusals()

    def _asked_at(self, run: HoldingRun) -> float:
        """The order of the calls: the run that GitHub was asked about longest ago comes first."""
        asked = self._asked.get((run.repository, run.run_id))
        return asked[1].timestamp() if asked is not None else -inf

    async def _check(self, github: GitHub, run: HoldingRun) -> None:
        ended = self._ended.get((run.repository, run.run_id))
        waited = self._age_of(ended) if ended is not None else timedelta(0)
        if ended is None:
            await self._ask(github, run)
        elif waited < self._grace:
            self._keep(run)
        else:
            # Asked again, because a re-run keeps the id of the run and may need the instances of an earlier attempt.
            current = await self._ask(github, run)
            if current is not None and current.has_ended and current.attempt == ended.attempt:
                await self._release_or_report(ended, waited)

    def _age_of(self, ended: EndedRun) -> timedelta:
        return self._context.clock.now() - self._first_seen.known[ended.anomaly()]

    def _keep(self, run: HoldingRun) -> None:
        """Keep what is known about a run that GitHub is not asked about now."""
        key = run.repository, run.run_id
        if key in self._ended:
            self._first_seen.keep(self._ended[key].anomaly())
        if key in self._asked:
            self._first_seen.keep(AskedRun(*key, self._asked[key][0]).anomaly())

    async def _ask(self, github: GitHub, run: HoldingRun) -> GitHubRun | None:
        """Ask GitHub about a run and record the answer; None if it has not changed, or is not known now."""
        key = run.repository, run.run_id
        now = self._context.clock.now()
        etag, asked_at = self._asked.get(key, ("", None))
        is_early = asked_at is not None and now - asked_at < timedelta(seconds=CHECK_INTERVAL_S)
        if is_early or self._calls_left <= 0 or self._age_of_refusal(run.repository) < REFUSED_S:
            self._keep(run)
            return None
        self._calls_left -= 1
        found = None
        try:
            found = await github.get_run(run.scope, run.repository, int(run.run_id), etag=etag)
        except NotFound:
            # Deleted, or the credential does not see the repository: no proof that the run has ended.
            etag = ""
        except UserError as error:
            self._keep(run)
            self._refuse(run, error)
        except RemudaError as error:
            self._context.event_log.record("run-unread", error.message, run_id=run.run_id)
            self._keep(run)
            # It may have been the first of many timeouts. The next sweep begins with another run.
            self._calls_left = 0
        else:
            self._refused.pop(run.repository, None)
            if found is not None:
                etag = "" if found.has_ended else found.etag
        self._first_seen.record(AskedRun(*key, etag).anomaly(), now)
        if found is not None and found.has_ended and found.attempt:
            anomaly = EndedRun(*key, found.attempt).anomaly()
            # Not since the sweep began: it may have taken long, and the run may have ended meanwhile.
            self._first_seen.record(anomaly, self._first_seen.known.get(anomaly, self._context.clock.now()))
        return found

    async def _release_or_report(self, ended: EndedRun, waited: timedelta) -> None:
        """A run that cannot be released, for example because a record cannot be parsed, does not stop the others."""
        try:
            await self._release(ended, waited)
        except RemudaError as error:
            self._result.error(f"run {ended.run_id} of {ended.repository} cannot be released: {error.message}")

    async def _release(self, ended: EndedRun, waited: timedelta) -> None:
        """Release the provisions of the ended attempts. The write fails if another process did it first."""
        held = 0
        why = f"its workflow run ended in attempt {ended.attempt} and did not release it"
        for provision in await self._context.store.provisions_of_run(ended.run_id):
            is_committed = provision.status is ProvisionStatus.COMMITTED and not provision.runner_set
            # Of a provision that is still open, its deadline decides soon.
            if not is_committed or provision.attempt > ended.attempt:
                continue
            now = self._context.clock.now()
            closed = released(provision, now=now, why=why, ending=ProvisionEnding.UNRELEASED)
            try:
                await self._context.store.replace_provision(provision, closed)
            except Conflict:
                continue
            held += len(provision.instance_ids)
            self._context.event_log.record("provision-closed", why, run_id=ended.run_id)
            await self._take_back(closed)
        if held:
            sentence = describe_unreleased(ended, waited_s=waited.total_seconds(), held=held)
            self._result.warn(WarningKind.RUN_UNRELEASED, sentence)

    # A credential without the permission to read Actions -------------------------------------------------------------

    def _refuse(self, run: HoldingRun, error: UserError) -> None:
        """Warn about a repository whose runs the credential may not read, once as long as that lasts."""
        fix = f"; {error.fix}" if error.fix else ""
        refusal = UnreadableRepository.of(run.repository, f"{error.message}{fix}")
        if run.repository not in self._refused:
            self._result.warn(WarningKind.RUN_UNRELEASED, str(refusal))
        self._refused[run.repository] = refusal, self._context.clock.now()

    def _age_of_refusal(self, repository: str) -> float:
        if repository not in self._refused:
            return inf
        _, at = self._refused[repository]
        return (self._context.clock.now() - at).total_seconds()

    def _remember_refusals(self) -> None:
        for repository, (refusal, at) in self._refused.items():
            if self._age_of_refusal(repository) < FORGOTTEN_AFTER_S:
                self._first_seen.record(refusal.anomaly(), at)


def _holding_runs(records: Iterable[Instance]) -> Sequence[HoldingRun]:
    """Runs of GitHub, whose ids are numbers, with instances of their own. Those of runner sets end with their job."""
    found: dict[HoldingRun, None] = {}
    for item in records:
        repository = item.assignment.repository.lower() if item.assignment is not None else ""
        is_held = item.state in ASSIGNED and not item.runner_set
        if is_held and is_repository(repository) and item.run_id.isdecimal() and item.run_id.isascii():
            found[HoldingRun(repository=repository, run_id=item.run_id, scope=item.scope)] = None
    return list(found)
