"""The fake GitHub's core, with a clock that the test controls."""

import itertools
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remuda.fake_github.registry import GitHubCore
from remuda.fake_github.state import (
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


class GitHubWorld:
    def __init__(self, settings: FakeGitHubSettings | None = None) -> None:
        self.clock = FakeClock()
        self.core = GitHubCore(clock=self.clock, settings=settings)

    def register(
        self, name: str, labels: Iterable[str] = ("a",), *, scope: str = REPO, **changed: Any
    ) -> RegisteredRunner:
        token = self.core.registry.issue(TokenKind.REGISTRATION, scope).value
        values = {"token": token, "default_labels": False, "ephemeral": False, "replace": False, **changed}
        return self.core.registry.register(scope=scope, name=name, labels=tuple(labels), **values)

    def online(self, name: str, labels: Iterable[str] = ("a",), **changed: Any) -> RegisteredRunner:
        runner = self.register(name, labels, **changed)
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

    def advance(self, seconds: float) -> None:
        """Advance the clock and call `tick` at each deadline, like the server."""
        ends_at = self.clock.at + seconds
        while (due := self.core.next_due()) is not None and due <= ends_at:
            self.clock.at = max(due, self.clock.at)
            self.core.tick()
        self.clock.at = ends_at


def raises_api_error(status: int) -> pytest.RaisesExc[ApiError]:
    return pytest.raises(ApiError, check=lambda problem: problem.status == status)


@pytest.fixture
def world() -> GitHubWorld:
    return GitHubWorld()


# Tokens


def test_registration_token_is_reusable_until_it_expires(world: GitHubWorld) -> None:
    token = world.core.registry.issue(TokenKind.REGISTRATION, REPO).value
    world.register("one", token=token)
    world.register("two", token=token)
    world.advance(3600)
    with raises_api_error(401):
        world.register("three", token=token)


def test_token_is_valid_for_its_scope_and_kind_only(world: GitHubWorld) -> None:
    registry = world.core.registry
    runner = world.register("one")
    other_scope = registry.issue(TokenKind.REMOVAL, "acme/gadgets")
    registration = registry.issue(TokenKind.REGISTRATION, REPO)
    for wrong in (other_scope, registration):
        with raises_api_error(401):
            registry.remove(scope=REPO, token=wrong.value, runner_id=runner.id)
    right = registry.issue(TokenKind.REMOVAL, REPO)
    registry.remove(scope=REPO, token=right.value, runner_id=runner.id)
    assert registry.of(REPO) == []


def test_unknown_scopes_and_missing_permissions_are_rejected() -> None:
    world = GitHubWorld(FakeGitHubSettings(known_scopes=(REPO,)))
    registry = world.core.registry
    token = registry.issue_access()
    registry.check_access(token, REPO.upper(), permission="actions", write=True)
    registry.check_access(token, "acme", permission="administration", write=True)
    with raises_api_error(404):
        registry.check_access(token, "acme/other", permission="", write=False)
    reader = registry.issue_access(scopes=("acme",), permissions={"administration": "write", "actions": "read"})
    registry.check_access(reader, REPO, permission="administration", write=False)
    registry.check_access(reader, REPO, permission="actions", write=False)
    registry.check_access(reader, REPO, permission="", write=False)
    with raises_api_error(403):
        registry.check_access(reader, REPO, permission="actions", write=True)
    with raises_api_error(403):
        registry.check_access(reader, "acme", permission="organization_self_hosted_runners", write=False)
    with raises_api_error(401):
        registry.access("github_pat_guessed")


# Registrations


def test_name_is_unique_per_scope(world: GitHubWorld) -> None:
    world.register("one")
    with raises_api_error(409):
        world.register("ONE")
    world.register("one", scope="acme")


def test_replaced_runner_keeps_its_labels_and_gets_a_new_secret(world: GitHubWorld) -> None:
    first = world.online("one", ["old"])
    secret = first.secret
    second = world.register("one", ["new"], replace=True)
    assert second.id == first.id
    assert set(second.labels) == {"old", "new"}
    assert not second.online
    with raises_api_error(410):
        world.core.registry.runner_of(secret)


@pytest.mark.parametrize(
    ("name", "labels"), [("", ["a"]), ("x" * 65, ["a"]), ("one", []), ("one", ["a", ""]), ("one", ["a" * 257])]
)
def test_invalid_names_and_labels_are_rejected(world: GitHubWorld, name: str, labels: list[str]) -> None:
    with raises_api_error(422):
        world.register(name, labels)


def test_runner_with_a_job_cannot_be_deleted(world: GitHubWorld) -> None:
    runner = world.online("one")
    job = world.job()
    assert not world.core.registry.busy(runner)
    with raises_api_error(422):  # assigned: not shown as busy, but the delete checks it
        world.core.registry.delete(REPO, runner.id)
    world.core.queue.acknowledge(runner, job.id)
    assert world.core.registry.busy(runner)
    with raises_api_error(422):
        world.core.registry.delete(REPO, runner.id)
    world.finish(runner, job)
    world.core.registry.delete(REPO, runner.id)
    with raises_api_error(410):
        world.core.registry.runner_of(runner.secret)
    with raises_api_error(404):
        world.core.registry.delete(REPO, runner.id)


def test_offline_runners_are_deleted_ephemeral_ones_earlier(world: GitHubWorld) -> None:
    world.register("plain")
    world.register("once", ephemeral=True)
    world.advance(24 * 3600 + 1)
    assert [runner.name for runner in world.core.state] == ["plain"]
    world.advance(13 * 24 * 3600)
    assert list(world.core.state) == []


# Sessions


def test_second_session_conflicts_until_the_first_is_lost(world: GitHubWorld) -> None:
    runner = world.online("one")
    with raises_api_error(409):
        world.core.registry.open_session(runner, version="2.336.0")
    world.advance(world.core.state.settings.liveness_s)
    assert not runner.online
    world.core.registry.open_session(runner, version="2.336.0")
    assert runner.online


def test_open_poll_keeps_the_session_alive(world: GitHubWorld) -> None:
    runner = world.online("one")
    session = runner.session or ""
    world.core.registry.poll_begins(session)
    world.advance(3600)
    assert runner.online
    world.core.registry.poll_ends(runner, session)
    world.advance(world.core.state.settings.liveness_s - 0.1)
    assert runner.online
    world.advance(0.2)
    assert not runner.online
    with raises_api_error(404):
        world.core.registry.in_session(runner.secret, session)


def test_lost_runner_stays_busy_until_its_lease_expires(world: GitHubWorld) -> None:
    runner = world.online("one")
    job = world.running(runner)
    world.advance(599)
    assert not runner.online
    assert world.core.registry.busy(runner)
    with raises_api_error(422):
        world.core.registry.delete(REPO, runner.id)
    world.advance(2)
    assert (job.phase, job.conclusion) == (JobPhase.COMPLETED, Conclusion.FAILURE)
    assert not world.core.registry.busy(runner)
    world.core.registry.delete(REPO, runner.id)


def test_renewed_lease_does_not_expire(world: GitHubWorld) -> None:
    runner = world.online("one")
    job = world.running(runner)
    for _ in range(5):
        world.advance(500)
        world.core.queue.renew(runner, job.id)
    assert job.phase is JobPhase.IN_PROGRESS


# Jobs


def test_job_is_assigned_to_an_idle_online_runner_in_scope(world: GitHubWorld) -> None:
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


def test_organization_runner_accepts_jobs_of_all_repositories(world: GitHubWorld) -> None:
    runner = world.online("org", scope="ACME")
    assert world.job(repo="other/widgets").runner_id is None
    assert world.job(repo="acme/anything").runner_id == runner.id


def test_job_not_picked_up_is_assigned_to_another_runner(world: GitHubWorld) -> None:
    first = world.online("one")
    job = world.job()
    world.core.registry.close_session(first)
    second = world.online("two")
    world.core.registry.poll_begins(second.session or "")
    world.advance(59)
    assert job.runner_id == first.id
    world.advance(2)
    assert job.runner_id == second.id
    assert job.status == "queued"
    with raises_api_error(409):
        world.core.queue.acknowledge(first, job.id)
    world.core.registry.delete(REPO, first.id)


def test_ephemeral_runner_is_deleted_after_one_job(world: GitHubWorld) -> None:
    runner = world.online("once", ephemeral=True)
    job = world.job()
    waiting = world.job()
    world.core.queue.acknowledge(runner, job.id)
    world.finish(runner, job)
    assert world.core.registry.of(REPO) == []
    assert waiting.phase is JobPhase.QUEUED


def test_second_completion_does_not_change_the_result(world: GitHubWorld) -> None:
    runner = world.online("one")
    job = world.running(runner)
    world.finish(runner, job)
    world.core.queue.complete(runner, job.id, Conclusion.FAILURE, output="late", steps=[])
    assert job.conclusion is Conclusion.SUCCESS


def test_cancel_in_each_phase(world: GitHubWorld) -> None:
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


def test_job_queued_for_a_day_is_cancelled(world: GitHubWorld) -> None:
    job = world.job()
    world.advance(24 * 3600)
    assert job.conclusion is Conclusion.CANCELLED


def test_state_survives_storing_and_loading(world: GitHubWorld) -> None:
    busy, idle = world.online("busy"), world.register("idle")
    running = world.running(busy)
    waiting = world.job(["unmatched"])
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
def test_all_labels_must_match_ignoring_case(wanted: list[str], offered: list[str]) -> None:
    here = {label.lower() for label in offered}
    expected = bool(wanted) and all(label.lower() in here for label in wanted)
    assert matches(tuple(wanted), tuple(offered)) is expected
    assert matches(tuple(w.upper() for w in wanted), tuple(o.lower() for o in offered)) is expected


@given(st.lists(st.tuples(st.sampled_from(["job", "session", "tick", "finish", "delete"]), st.integers(0, 2))))
def test_runner_has_at_most_one_job_and_job_at_most_one_runner(steps: list[tuple[str, int]]) -> None:
    world = GitHubWorld()
    runners = [world.register(f"r{number}") for number in range(3)]
    for action, number in steps:
        runner = runners[number]
        alive = runner.id in world.core.state.runners
        held = world.core.state.jobs.get(runner.job_id or 0)
        if action == "job":
            world.job()
        elif action == "tick":
            world.advance([1, 30, 700][number])
        elif action == "session" and alive and not runner.online:
            world.core.registry.open_session(runner, version="2.336.0")
        elif action == "finish" and alive and held is not None:
            world.core.queue.acknowledge(runner, held.id)
            world.finish(runner, held)
        elif action == "delete" and alive and held is None:
            world.core.registry.delete(REPO, runner.id)
        check_invariants(world)


def check_invariants(world: GitHubWorld) -> None:
    state = world.core.state
    for job in state.jobs.values():
        holders = [runner.id for runner in state if runner.job_id == job.id]
        at_work = job.phase in {JobPhase.ASSIGNED, JobPhase.IN_PROGRESS}
        assert holders == ([job.runner_id] if at_work else [])
    idle = [runner for runner in state if runner.online and runner.job_id is None]
    waiting = [job for job in state.jobs.values() if job.phase is JobPhase.QUEUED]
    assert not any(runner.accepts(job) for runner in idle for job in waiting)
