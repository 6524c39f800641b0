"""The local GitHub's core on a clock that only the test moves."""

import itertools
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remuda.fake_github.core import GitHubCore
from remuda.fake_github.model import (
    ApiError,
    Conclusion,
    FakeGitHubSettings,
    GitHubJob,
    JobPhase,
    RegisteredRunner,
    TokenKind,
    matches,
)

REPO = "acme/widgets"


class FakeClock:
    def __init__(self) -> None:
        self.at = 1_000_000.0
        self._numbers = itertools.count(1)

    def now(self) -> float:
        return self.at

    def token(self, prefix: str) -> str:
        return f"{prefix}{next(self._numbers)}"


class World:
    def __init__(self, settings: FakeGitHubSettings | None = None) -> None:
        self.clock = FakeClock()
        self.core = GitHubCore(clock=self.clock, settings=settings)

    def register(
        self, name: str, labels: Iterable[str] = ("a",), *, scope: str = REPO, ephemeral: bool = False
    ) -> RegisteredRunner:
        token = self.core.registry.issue(TokenKind.REGISTRATION, scope)
        return self.core.registry.register(
            scope=scope,
            token=token.value,
            name=name,
            labels=tuple(labels),
            default_labels=False,
            ephemeral=ephemeral,
            replace=False,
        )

    def online(
        self, name: str, labels: Iterable[str] = ("a",), *, scope: str = REPO, ephemeral: bool = False
    ) -> RegisteredRunner:
        runner = self.register(name, labels, scope=scope, ephemeral=ephemeral)
        self.core.registry.open_session(runner, version="2.336.0")
        return runner

    def job(self, labels: Iterable[str] = ("a",), *, repo: str = REPO) -> GitHubJob:
        return self.core.queue.add(
            repo=repo, run_id="1", run_attempt=1, name="job", labels=tuple(labels), steps=[], env={}
        )

    def running(self, runner: RegisteredRunner) -> GitHubJob:
        job = self.job(runner.labels)
        self.core.queue.acknowledge(runner, job.id)
        return job

    def finish(self, runner: RegisteredRunner, job: GitHubJob) -> None:
        self.core.queue.complete(runner, job.id, Conclusion.SUCCESS, output="", steps=[])

    def passes(self, seconds: float) -> None:
        """Ticks at every due moment, as the server does."""
        ends_at = self.clock.at + seconds
        while (due := self.core.next_due()) is not None and due <= ends_at:
            self.clock.at = max(due, self.clock.at)
            self.core.tick()
        self.clock.at = ends_at


def refused(status: int) -> pytest.RaisesExc[ApiError]:
    return pytest.raises(ApiError, check=lambda problem: problem.status == status)


@pytest.fixture
def world() -> World:
    return World()


# Tokens


def test_a_registration_token_serves_many_runners_until_it_expires(world: World) -> None:
    registry = world.core.registry
    token = registry.issue(TokenKind.REGISTRATION, REPO)

    def register(name: str) -> None:
        registry.register(
            scope=REPO,
            token=token.value,
            name=name,
            labels=("a",),
            default_labels=False,
            ephemeral=False,
            replace=False,
        )

    register("one")
    register("two")
    world.passes(3600)
    with refused(401):
        register("three")


def test_a_token_is_good_for_its_scope_and_purpose_only(world: World) -> None:
    registry = world.core.registry
    runner = world.register("one")
    elsewhere = registry.issue(TokenKind.REMOVAL, "acme/gadgets")
    registration = registry.issue(TokenKind.REGISTRATION, REPO)
    for wrong in (elsewhere, registration):
        with refused(401):
            registry.remove(scope=REPO, token=wrong.value, runner_id=runner.id)
    right = registry.issue(TokenKind.REMOVAL, REPO)
    registry.remove(scope=REPO, token=right.value, runner_id=runner.id)
    assert registry.of(REPO) == []


def test_unknown_scopes_and_read_only_tokens_are_refused() -> None:
    world = World(FakeGitHubSettings(known_scopes=(REPO,)))
    registry = world.core.registry
    token = registry.issue_access()
    registry.check_access(token, REPO.upper(), write=True)
    registry.check_access(token, "acme", write=True)
    with refused(404):
        registry.check_access(token, "acme/other", write=False)
    reader = registry.issue_access(scopes=("acme",), write=False)
    registry.check_access(reader, REPO, write=False)
    with refused(403):
        registry.check_access(reader, REPO, write=True)
    with refused(401):
        registry.access("github_pat_guessed")


# Registrations


def test_a_name_is_taken_once_in_a_scope(world: World) -> None:
    world.register("one")
    with refused(409):
        world.register("ONE")
    world.register("one", scope="acme")


def test_a_replaced_runner_keeps_its_old_labels_and_loses_its_secret(world: World) -> None:
    first = world.online("one", ["old"])
    secret = first.secret
    token = world.core.registry.issue(TokenKind.REGISTRATION, REPO)
    second = world.core.registry.register(
        scope=REPO,
        token=token.value,
        name="one",
        labels=("new",),
        default_labels=False,
        ephemeral=False,
        replace=True,
    )
    assert second.id == first.id
    assert set(second.labels) == {"old", "new"}
    assert not second.online
    with refused(410):
        world.core.registry.runner_of(secret)


@pytest.mark.parametrize(("name", "labels"), [("", ["a"]), ("x" * 65, ["a"]), ("one", []), ("one", ["a", ""])])
def test_bad_names_and_labels_are_refused(world: World, name: str, labels: list[str]) -> None:
    with refused(422):
        world.register(name, labels)


def test_a_runner_with_a_job_is_not_deleted(world: World) -> None:
    runner = world.online("one")
    job = world.job()
    assert not world.core.registry.busy(runner)
    with refused(422):  # assigned: the list does not show it, the delete knows it
        world.core.registry.delete(REPO, runner.id)
    world.core.queue.acknowledge(runner, job.id)
    assert world.core.registry.busy(runner)
    with refused(422):
        world.core.registry.delete(REPO, runner.id)
    world.finish(runner, job)
    world.core.registry.delete(REPO, runner.id)
    with refused(410):
        world.core.registry.runner_of(runner.secret)
    with refused(404):
        world.core.registry.delete(REPO, runner.id)


def test_offline_runners_are_forgotten_ephemeral_ones_earlier(world: World) -> None:
    world.register("plain")
    world.register("once", ephemeral=True)
    world.passes(24 * 3600 + 1)
    assert [runner.name for runner in world.core.state] == ["plain"]
    world.passes(13 * 24 * 3600)
    assert list(world.core.state) == []


# Sessions


def test_a_second_session_is_a_conflict_until_the_first_has_vanished(world: World) -> None:
    runner = world.online("one")
    with refused(409):
        world.core.registry.open_session(runner, version="2.336.0")
    world.passes(world.core.state.settings.liveness_s)
    assert not runner.online
    world.core.registry.open_session(runner, version="2.336.0")
    assert runner.online


def test_an_open_poll_keeps_the_session(world: World) -> None:
    runner = world.online("one")
    session = runner.session or ""
    world.core.registry.poll_begins(session)
    world.passes(3600)
    assert runner.online
    world.core.registry.poll_ends(runner, session)
    world.passes(world.core.state.settings.liveness_s - 0.1)
    assert runner.online
    world.passes(0.2)
    assert not runner.online
    with refused(404):
        world.core.registry.in_session(runner.secret, session)


def test_a_vanished_runner_stays_busy_until_its_lease_ends_and_the_job_fails(world: World) -> None:
    runner = world.online("one")
    job = world.running(runner)
    world.passes(599)
    assert not runner.online
    assert world.core.registry.busy(runner)
    with refused(422):
        world.core.registry.delete(REPO, runner.id)
    world.passes(2)
    assert (job.phase, job.conclusion) == (JobPhase.COMPLETED, Conclusion.FAILURE)
    assert not world.core.registry.busy(runner)
    world.core.registry.delete(REPO, runner.id)


def test_a_renewed_lease_does_not_end(world: World) -> None:
    runner = world.online("one")
    job = world.running(runner)
    for _ in range(5):
        world.passes(500)
        world.core.queue.renew(runner, job.id)
    assert job.phase is JobPhase.IN_PROGRESS


# Jobs


def test_jobs_go_to_an_idle_online_runner_in_scope(world: World) -> None:
    world.register("never-connected")
    other = world.online("other-repo", scope="acme/gadgets")
    mine = world.online("mine")
    first, second = world.job(), world.job()
    assert first.runner_id == mine.id
    assert second.phase is JobPhase.QUEUED
    assert other.job_id is None
    world.core.queue.acknowledge(mine, first.id)
    world.finish(mine, first)
    assert second.runner_id == mine.id


def test_a_runner_of_the_organisation_takes_jobs_of_all_its_repositories(world: World) -> None:
    runner = world.online("org", scope="ACME")
    assert world.job(repo="other/widgets").runner_id is None
    assert world.job(repo="acme/anything").runner_id == runner.id


def test_a_job_that_was_not_picked_up_goes_to_another_runner(world: World) -> None:
    first = world.online("one")
    job = world.job()
    world.core.registry.close_session(first)
    second = world.online("two")
    world.core.registry.poll_begins(second.session or "")
    world.passes(59)
    assert job.runner_id == first.id
    world.passes(2)
    assert job.runner_id == second.id
    assert job.status == "queued"
    with refused(409):
        world.core.queue.acknowledge(first, job.id)
    world.core.registry.delete(REPO, first.id)


def test_an_ephemeral_runner_takes_one_job_and_is_gone(world: World) -> None:
    runner = world.online("once", ephemeral=True)
    job = world.job()
    waiting = world.job()
    world.core.queue.acknowledge(runner, job.id)
    world.finish(runner, job)
    assert world.core.registry.of(REPO) == []
    assert waiting.phase is JobPhase.QUEUED


def test_completing_twice_is_harmless_and_the_first_result_stands(world: World) -> None:
    runner = world.online("one")
    job = world.running(runner)
    world.finish(runner, job)
    world.core.queue.complete(runner, job.id, Conclusion.FAILURE, output="late", steps=[])
    assert job.conclusion is Conclusion.SUCCESS


def test_cancelling(world: World) -> None:
    waiting = world.job()
    assert world.core.queue.cancel(waiting.id).conclusion is Conclusion.CANCELLED
    runner = world.online("one")
    assigned = world.job()
    world.core.queue.cancel(assigned.id)
    assert runner.job_id is None
    running = world.running(runner)
    world.core.queue.cancel(running.id)
    assert running.phase is JobPhase.IN_PROGRESS
    assert world.core.queue.message_for(runner) is running


def test_a_job_that_waits_for_a_day_is_cancelled(world: World) -> None:
    job = world.job()
    world.passes(24 * 3600)
    assert job.conclusion is Conclusion.CANCELLED


def test_the_state_survives_being_stored_and_loaded(world: World) -> None:
    busy, idle = world.online("busy"), world.register("idle")
    running = world.running(busy)
    waiting = world.job(["nobody"])
    stored = [(kind, key, doc) for kind, key, doc in world.core.state.take_changes() if doc is not None]
    later = GitHubCore(clock=world.clock)
    later.state.load(stored)
    later.queue.restore()
    assert later.state.runners == {busy.id: busy, idle.id: idle}
    assert later.state.jobs == {running.id: running, waiting.id: waiting}
    assert later.registry.runner_of(busy.secret).session == busy.session
    assert later.state.new_id() > waiting.id
    assert later.state.take_changes() != []


LABELS = st.lists(st.sampled_from(["a", "B", "gpu", "Linux", "remuda-7"]), max_size=5)


@given(wanted=LABELS, offered=LABELS)
def test_labels_match_when_all_are_there_whatever_their_case(wanted: list[str], offered: list[str]) -> None:
    here = {label.lower() for label in offered}
    expected = bool(wanted) and all(label.lower() in here for label in wanted)
    assert matches(tuple(wanted), tuple(offered)) is expected
    assert matches(tuple(w.upper() for w in wanted), tuple(o.lower() for o in offered)) is expected


@given(st.lists(st.tuples(st.sampled_from(["job", "session", "tick", "finish", "delete"]), st.integers(0, 2))))
def test_no_runner_ever_has_two_jobs_and_no_job_two_runners(steps: list[tuple[str, int]]) -> None:
    world = World()
    runners = [world.register(f"r{number}") for number in range(3)]
    for action, number in steps:
        runner = runners[number]
        alive = runner.id in world.core.state.runners
        held = world.core.state.jobs.get(runner.job_id or 0)
        if action == "job":
            world.job()
        elif action == "tick":
            world.passes([1, 30, 700][number])
        elif action == "session" and alive and not runner.online:
            world.core.registry.open_session(runner, version="v")
        elif action == "finish" and alive and held is not None:
            world.core.queue.acknowledge(runner, held.id)
            world.finish(runner, held)
        elif action == "delete" and alive and held is None:
            world.core.registry.delete(REPO, runner.id)
        check(world)


def check(world: World) -> None:
    state = world.core.state
    for job in state.jobs.values():
        holders = [runner.id for runner in state if runner.job_id == job.id]
        at_work = job.phase in {JobPhase.ASSIGNED, JobPhase.IN_PROGRESS}
        assert holders == ([job.runner_id] if at_work else [])
    idle = [runner for runner in state if runner.online and runner.job_id is None]
    waiting = [job for job in state.jobs.values() if job.phase is JobPhase.QUEUED]
    assert not any(runner.accepts(job) for runner in idle for job in waiting)
