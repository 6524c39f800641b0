"""Runner scale sets: assignment of jobs to sets, message sessions, and the messages about jobs.

The behaviour follows GitHub's client (github.com/actions/scaleset: client.go, session_client.go, types.go, README.md)
and measurements against github.com (github.com/rhobuild/runpool, test/contract/githubactions).
"""

import json
import uuid
from enum import StrEnum
from typing import Any

from remuda.fake_github.faults import FaultBoard, FaultKind
from remuda.fake_github.jobs import JobQueue
from remuda.fake_github.state import (
    ApiError,
    Conclusion,
    Document,
    GitHubJob,
    GitHubState,
    JobPhase,
    RegisteredRunner,
    ScaleSet,
    covers,
    matches,
    timestamp,
)

#: Job messages per message (README.md).
MAX_EVENTS = 50
#: Assignments of a job that no runner takes (README.md). actions-runner-controller#4602: none follows the third.
MAX_LAPSES = 3
#: Time in messages that is not known yet: the zero value of the service's data type.
NO_TIME = "0001-01-01T00:00:00Z"
RESULTS = {Conclusion.SUCCESS: "succeeded", Conclusion.FAILURE: "failed", Conclusion.CANCELLED: "canceled"}


class MessageType(StrEnum):
    AVAILABLE = "JobAvailable"
    ASSIGNED = "JobAssigned"
    STARTED = "JobStarted"
    COMPLETED = "JobCompleted"


class ScaleSets:
    def __init__(self, state: GitHubState, queue: JobQueue, faults: FaultBoard) -> None:
        self._state = state
        self._queue = queue
        self._faults = faults
        #: Unfinished jobs that are assigned to each set.
        self._assigned: dict[int, dict[int, GitHubJob]] = {}
        #: Number of open polls per session. A session with an open poll is alive.
        self._polls: dict[str, int] = {}
        queue.observer = self

    def restore(self) -> None:
        """Rebuild the assignments from the loaded state."""
        for job in self._queue.unfinished:
            if job.scale_set_id:
                self._jobs_of(job.scale_set_id)[job.id] = job

    # Scale sets

    def create(
        self, *, scope: str, name: str, group_id: int, labels: tuple[str, ...], disable_update: bool
    ) -> ScaleSet:
        if self.find(scope, group_id=group_id, name=name):
            # 400 and the exception's name as reported by users of GitHub's client (cloudbase/garm).
            raise ApiError(400, f"The runner scale set {name} exists.", type_name="RunnerScaleSetExistsException")
        now = self._state.clock.now()
        scale_set = ScaleSet(
            id=self._state.new_id(),
            scope=scope,
            name=name,
            group_id=group_id,
            labels=labels,
            disable_update=disable_update,
            created_at=now,
            seen_at=now,
        )
        self._state.scale_sets[scale_set.id] = scale_set
        self._changed(scale_set)
        return scale_set

    def find(self, scope: str, *, group_id: int | None = None, name: str | None = None) -> list[ScaleSet]:
        return [
            each
            for each in self._state.scale_sets.values()
            if each.scope.lower() == scope.lower()
            and (group_id is None or each.group_id == group_id)
            and (name is None or each.name.lower() == name.lower())
        ]

    def get(self, scope: str, set_id: int) -> ScaleSet:
        found = self._state.scale_sets.get(set_id)
        if found is None or found.scope.lower() != scope.lower():
            raise ApiError(
                404, f"No runner scale set found with identifier {set_id}.", type_name="RunnerScaleSetNotFoundException"
            )
        return found

    def update(self, scale_set: ScaleSet, *, name: str, group_id: int, disable_update: bool) -> None:
        """Change a set. Labels stay as they are: GitHub ignores other ones without an error."""
        others = [each for each in self.find(scale_set.scope, group_id=group_id, name=name) if each is not scale_set]
        if others:
            raise ApiError(400, f"The runner scale set {name} exists.", type_name="RunnerScaleSetExistsException")
        scale_set.name, scale_set.group_id, scale_set.disable_update = name, group_id, disable_update
        self._changed(scale_set)

    def delete(self, scale_set: ScaleSet, *, forced: bool = False) -> None:
        """Delete a set and its idle runners. Jobs that no runner has go back to the queue.

        GitHub refuses it while a runner has a job (actions-runner-controller, docs/adrs/2022-10-27), unless it deletes
        the set itself (`forced`).
        """
        runners = self.runners(scale_set)
        if not forced and any(runner.job_id is not None for runner in runners):
            raise ApiError(400, "A runner of the set runs a job.", type_name="JobStillRunningException")
        self._end_session(scale_set)
        for runner in runners:
            if runner.job_id is None:
                self._state.drop_runner(runner)
        del self._state.scale_sets[scale_set.id]
        self._changed(scale_set)
        self._forget_events(scale_set, range(scale_set.last_event_id + 1))
        for job in self._assigned.pop(scale_set.id, {}).values():
            if job.phase is JobPhase.QUEUED:
                job.scale_set_id, job.set_due_at = 0, None
                self._state.changed("job", job.id)
                self._queue.dispatch(job)
                self.job_queued(job)

    def runners(self, scale_set: ScaleSet) -> list[RegisteredRunner]:
        return [runner for runner in self._state if runner.scale_set_id == scale_set.id]

    def statistics(self, scale_set: ScaleSet) -> dict[str, int]:
        jobs = self._jobs_of(scale_set.id).values()
        runners = self.runners(scale_set)
        busy = sum(runner.job_id is not None for runner in runners)
        fault = self._faults.take(FaultKind.WRONG_STATISTICS, scale_set.name)
        return {
            "totalAvailableJobs": len(self._unassigned(scale_set)),
            "totalAcquiredJobs": sum(job.phase is JobPhase.QUEUED for job in jobs) if self._must_acquire else 0,
            "totalAssignedJobs": len(jobs) if fault is None else fault.value or 0,
            "totalRunningJobs": sum(job.phase is JobPhase.IN_PROGRESS for job in jobs),
            "totalRegisteredRunners": len(runners),
            "totalBusyRunners": busy,
            "totalIdleRunners": sum(runner.online and runner.job_id is None for runner in runners),
        }

    # Sessions

    def open_session(self, scale_set: ScaleSet, owner: str) -> None:
        self.expire()
        if scale_set.session_id:
            raise ApiError(
                409,
                f"The runner scale set {scale_set.name} already has an active session for owner "
                f"{scale_set.session_owner}.",
                type_name="RunnerScaleSetSessionConflictException",
            )
        scale_set.session_id, scale_set.session_owner = _guid(self._state.clock.token("")), owner
        self._touch(scale_set)
        self._changed(scale_set)

    def in_session(self, scope: str, set_id: int, session_id: str) -> ScaleSet:
        """Return the set of the session and mark the session as used now."""
        scale_set = self.get(scope, set_id)
        if not session_id or scale_set.session_id != session_id:
            # As GitHub answers for a session that has ended (actions-runner-controller#4285).
            raise ApiError(
                400,
                f"The session identifier {session_id} is not valid.",
                type_name="RunnerScaleSetSessionExpiredException",
            )
        self._touch(scale_set)
        return scale_set

    def close_session(self, scale_set: ScaleSet) -> None:
        self._end_session(scale_set)

    def poll_begins(self, scale_set: ScaleSet) -> str:
        self._polls[scale_set.session_id] = self._polls.get(scale_set.session_id, 0) + 1
        return scale_set.session_id

    def poll_ends(self, scale_set: ScaleSet, session_id: str) -> None:
        left = self._polls.pop(session_id) - 1
        if left:
            self._polls[session_id] = left
        self._touch(scale_set)

    def announce(self, scale_set: ScaleSet, capacity: int) -> None:
        """Note the number of runners that the set may have in total, and assign jobs up to it."""
        if scale_set.capacity != capacity:
            scale_set.capacity = capacity
            self._changed(scale_set)
        self._fill(scale_set)

    def _touch(self, scale_set: ScaleSet) -> None:
        scale_set.seen_at = self._state.clock.now()

    def _end_session(self, scale_set: ScaleSet) -> None:
        if not scale_set.session_id:
            return
        scale_set.session_id = scale_set.session_owner = ""
        scale_set.capacity = None
        if self._state.settings.session_loses_messages:
            self._forget_events(scale_set, range(scale_set.last_event_id + 1))
            scale_set.ready, scale_set.delayed, scale_set.messages = [], [], []
        self._changed(scale_set)

    # Messages

    def has_message(self, scale_set: ScaleSet, last_id: int) -> bool:
        """Whether a poll can be answered. Nothing is delivered while the capacity is 0."""
        if scale_set.capacity == 0:
            return False
        return bool(scale_set.ready) or any(message["id"] > last_id for message in scale_set.messages)

    def next_message(self, scale_set: ScaleSet, last_id: int) -> Document | None:
        """Return the first message after `last_id`. It stays the same until it is acknowledged."""
        if not self.has_message(scale_set, last_id):
            return None
        pending = [message for message in scale_set.messages if message["id"] > last_id]
        if not pending:
            scale_set.last_message_id += 1
            events, scale_set.ready = scale_set.ready[:MAX_EVENTS], scale_set.ready[MAX_EVENTS:]
            message: Document = {
                "id": scale_set.last_message_id,
                "events": events,
                "statistics": self.statistics(scale_set),
            }
            scale_set.messages.append(message)
            self._changed(scale_set)
            if message["id"] <= last_id:
                return None
            pending = [message]
        first = pending[0]
        bodies = [self._state.set_events[_event_key(scale_set, event)] for event in first["events"]]
        return {
            "messageId": first["id"],
            "messageType": "RunnerScaleSetJobMessages",
            "body": json.dumps(bodies),
            "statistics": first["statistics"],
        }

    def acknowledge(self, scale_set: ScaleSet, message_id: int) -> None:
        """Forget a message. Idempotent."""
        done = [message for message in scale_set.messages if message["id"] == message_id]
        if not done:
            return
        scale_set.messages.remove(done[0])
        kept = {*scale_set.ready, *(event for _, event in scale_set.delayed)}
        kept.update(event for message in scale_set.messages for event in message["events"])
        self._forget_events(scale_set, [event for event in done[0]["events"] if event not in kept])
        self._changed(scale_set)

    def _emit(self, kind: MessageType, scale_set_id: int, job: GitHubJob, **more: Any) -> None:
        scale_set = self._state.scale_sets.get(scale_set_id)
        if scale_set is None or self._faults.take(FaultKind.MISSING_MESSAGE, kind):
            return
        scale_set.last_event_id += 1
        event = scale_set.last_event_id
        self._state.set_events[_event_key(scale_set, event)] = {"messageType": kind, **more, **self._describe(job)}
        self._state.changed("set-event", _event_key(scale_set, event))
        now = self._state.clock.now()
        late, again = (self._faults.take(each, kind) for each in (FaultKind.LATE_MESSAGE, FaultKind.DUPLICATE_MESSAGE))
        if late is None:
            scale_set.ready.append(event)
        else:
            scale_set.delayed.append((now + (late.seconds or 0.0), event))
        if again is not None:
            scale_set.delayed.append((now + (again.seconds or 0.0), event))
        self._changed(scale_set)

    def _describe(self, job: GitHubJob) -> Document:
        """The fields of all job messages (types.go, JobMessageBase)."""
        owner, _, repository = job.repo.partition("/")
        return {
            # 0 on github.com, where nothing is acquired (cloudbase/garm#459).
            "runnerRequestId": job.id if self._must_acquire else 0,
            "repositoryName": repository,
            "ownerName": owner,
            "jobId": job.message_job_id,
            "jobWorkflowRef": job.workflow or f"{job.repo}/.github/workflows/ci.yml@refs/heads/main",
            "jobDisplayName": job.name,
            "workflowRunId": int(job.run_id) if job.run_id.isdecimal() else 0,
            "eventName": job.event,
            "requestLabels": list(job.labels),
            "queueTime": timestamp(job.created_at),
            "scaleSetAssignTime": timestamp(job.set_assigned_at) or NO_TIME,
            "runnerAssignTime": timestamp(job.runner_assigned_at) or NO_TIME,
            "finishTime": timestamp(job.completed_at) or NO_TIME,
        }

    def _forget_events(self, scale_set: ScaleSet, events: Any) -> None:
        for event in events:
            if self._state.set_events.pop(_event_key(scale_set, event), None) is not None:
                self._state.changed("set-event", _event_key(scale_set, event))

    # Jobs

    def job_queued(self, job: GitHubJob) -> None:
        """Assign the job to the first set that has room, or offer it to all of them."""
        if self._state.settings.zero_capacity_trap:
            blind = [each.id for each in self._matching(job) if each.capacity == 0 and each.id not in job.blind_sets]
            if blind:
                job.blind_sets.extend(blind)
                self._state.changed("job", job.id)
        self._place(job)

    def job_given(self, job: GitHubJob) -> None:
        """Note a job that a runner of a set has already."""
        if job.scale_set_id:
            job.set_assigned_at = self._state.clock.now()
            self._name(job)
            self._jobs_of(job.scale_set_id)[job.id] = job
            self._emit(MessageType.ASSIGNED, job.scale_set_id, job)

    def job_started(self, job: GitHubJob) -> None:
        if not job.scale_set_id:
            return
        runner = {"runnerId": job.runner_id, "runnerName": job.runner_name}
        self._emit(MessageType.STARTED, job.scale_set_id, job, **runner)
        if self._faults.take(FaultKind.FALSE_COMPLETION, MessageType.STARTED):
            self._emit(MessageType.COMPLETED, job.scale_set_id, job, result="canceled", **runner)

    def job_finished(self, job: GitHubJob) -> None:
        if self._jobs_of(job.scale_set_id).pop(job.id, None) is None:
            return
        self._complete(job, RESULTS[job.conclusion or Conclusion.CANCELLED])

    def available(self, scale_set: ScaleSet) -> list[GitHubJob]:
        """Return the jobs that the set may acquire."""
        if not self._must_acquire:
            return []
        return [job for job in self._queue.waiting if not job.scale_set_id and scale_set.id in job.offered_sets]

    def _unassigned(self, scale_set: ScaleSet) -> list[GitHubJob]:
        """The waiting jobs with the set's labels that no set has.

        Their number is not limited by the capacity that a client announces (cloudbase/garm, metrics/scaleset.go).
        A set that announces 0 learns nothing (github.com/rhobuild/runpool).
        """
        if self._must_acquire:
            return self.available(scale_set)
        if scale_set.capacity == 0:
            return []
        return [
            job
            for job in self._queue.waiting
            if not job.scale_set_id and covers(scale_set.scope, job.repo) and matches(job.labels, scale_set.labels)
        ]

    def acquire(self, scale_set: ScaleSet, request_ids: list[int]) -> list[int]:
        """Assign offered jobs to the set. Return the ids of those that no other set or runner has taken."""
        offered = {job.id: job for job in self.available(scale_set)}
        acquired = [number for number in request_ids if number in offered]
        for number in acquired:
            self._assign(scale_set, offered[number])
        return acquired

    @property
    def _must_acquire(self) -> bool:
        return self._state.settings.jobs_must_be_acquired

    def _jobs_of(self, set_id: int) -> dict[int, GitHubJob]:
        return self._assigned.setdefault(set_id, {})

    def _matching(self, job: GitHubJob) -> list[ScaleSet]:
        """A job's labels must be a subset of the set's (rhobuild/runpool#150). The set's name is no label."""
        return [
            each
            for each in self._state.scale_sets.values()
            if covers(each.scope, job.repo) and matches(job.labels, each.labels)
        ]

    def _place(self, job: GitHubJob) -> None:
        is_free = job.phase is JobPhase.QUEUED and not job.scale_set_id and job.set_due_at is None
        if not is_free or job.lapses >= MAX_LAPSES:
            return
        for scale_set in self._matching(job):
            if scale_set.id in job.blind_sets or not self._has_room(scale_set):
                continue
            if not self._must_acquire:
                self._assign(scale_set, job)
                return
            if scale_set.id not in job.offered_sets:
                self._name(job)
                job.offered_sets.append(scale_set.id)
                self._state.changed("job", job.id)
                self._emit(MessageType.AVAILABLE, scale_set.id, job, acquireJobUrl="")

    def _has_room(self, scale_set: ScaleSet) -> bool:
        if not scale_set.session_id or scale_set.capacity is None:
            return False
        return len(self._jobs_of(scale_set.id)) + len(self.available(scale_set)) < scale_set.capacity

    def _fill(self, scale_set: ScaleSet) -> None:
        for job in self._queue.waiting:
            if job.scale_set_id:
                continue
            if not self._has_room(scale_set):
                return
            self._place(job)

    def _assign(self, scale_set: ScaleSet, job: GitHubJob) -> None:
        now = self._state.clock.now()
        job.scale_set_id = scale_set.id
        self._name(job)
        job.set_assigned_at, job.set_due_at = now, now + self._state.settings.assignment_life_s
        job.offered_sets = []
        self._jobs_of(scale_set.id)[job.id] = job
        self._state.changed("job", job.id)
        self._emit(MessageType.ASSIGNED, scale_set.id, job)
        self._queue.dispatch(job)

    def _name(self, job: GitHubJob) -> None:
        """Give the job the id that messages have, unless it has one."""
        if not job.message_job_id:
            job.message_job_id = _guid(self._state.clock.token(""))

    def _complete(self, job: GitHubJob, result: str) -> None:
        runner = {"runnerId": job.runner_id or 0, "runnerName": job.runner_name or ""}
        self._emit(MessageType.COMPLETED, job.scale_set_id, job, result=result, **runner)
        scale_set = self._state.scale_sets.get(job.scale_set_id)
        if scale_set is not None:
            self._fill(scale_set)

    # Deadlines

    def next_due(self) -> float | None:
        dues = [due for each in self._state.scale_sets.values() if (due := self._set_due(each)) is not None]
        dues += [at for each in self._state.scale_sets.values() for at, _ in each.delayed]
        dues += [job.set_due_at for job in self._queue.waiting if job.set_due_at is not None]
        return min(dues, default=None)

    def expire(self) -> None:
        """End unused sessions, delete dormant sets, deliver late messages, and let assignments lapse."""
        now = self._state.clock.now()
        for each in list(self._state.scale_sets.values()):
            for late in [late for late in each.delayed if late[0] <= now]:
                each.delayed.remove(late)
                each.ready.append(late[1])
                self._changed(each)
            if (self._set_due(each) or now + 1) > now:
                continue
            if each.session_id:
                self._end_session(each)
            else:
                self.delete(each, forced=True)
        for job in [job for job in self._queue.waiting if (job.set_due_at or now + 1) <= now]:
            if job.scale_set_id:
                self._lapse(job)
            else:
                self._requeue(job)

    def _set_due(self, scale_set: ScaleSet) -> float | None:
        settings = self._state.settings
        if not scale_set.session_id:
            return scale_set.seen_at + settings.scale_set_life_s
        return None if self._polls.get(scale_set.session_id) else scale_set.seen_at + settings.message_session_s

    def _lapse(self, job: GitHubJob) -> None:
        """Take the job from the set. It is assigned again later, under a new id."""
        self._jobs_of(job.scale_set_id).pop(job.id, None)
        job.lapses += 1
        if job.lapses < MAX_LAPSES:
            job.set_due_at = self._state.clock.now() + self._state.settings.reassignment_delay_s * job.lapses
        else:
            job.set_due_at = None
        self._complete(job, "canceled")
        job.scale_set_id, job.message_job_id = 0, ""
        self._state.changed("job", job.id)
        self._queue.dispatch(job)

    def _requeue(self, job: GitHubJob) -> None:
        job.set_due_at = None
        self._state.changed("job", job.id)
        self.job_queued(job)

    def _changed(self, scale_set: ScaleSet) -> None:
        self._state.changed("scale-set", scale_set.id)


def _event_key(scale_set: ScaleSet, event: int) -> str:
    return f"{scale_set.id}/{event}"


def _guid(token: str) -> str:
    return str(uuid.uuid5(uuid.NAMESPACE_OID, token))
