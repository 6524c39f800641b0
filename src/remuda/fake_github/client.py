"""Client for the admin API of the fake GitHub."""

import dataclasses
import ssl
from collections.abc import Mapping, Sequence
from typing import Any, Self

import httpx

#: Seconds to wait for a response, in addition to the server's wait in a long poll.
ANSWER_LIMIT_S = 30.0


class FakeGitHubError(Exception):
    """The fake GitHub rejected a request."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class JobStep:
    """A step with the keys of the workflow syntax. The runner evaluates the expressions in its texts."""

    run: str = ""
    name: str | None = None
    id: str = ""
    #: actions/checkout, in place of `run`.
    uses: str = ""
    inputs: Mapping[str, str] = dataclasses.field(default_factory=dict)
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    #: Of the key `if`; empty for success().
    condition: str = ""
    shell: str = ""
    working_directory: str = ""
    continue_on_error: str = ""
    timeout_minutes: str = ""
    #: success, failure, cancelled or skipped; None until the job has completed. The outcome ignores continue-on-error.
    conclusion: str | None = None
    outcome: str | None = None
    seconds: float = 0.0
    #: The end of the step's output.
    tail: str = ""

    def document(self) -> dict[str, Any]:
        """The step as the runner gets it."""
        return {
            "id": self.id,
            "name": self.name,
            "run": self.run,
            "uses": self.uses,
            "with": dict(self.inputs),
            "env": dict(self.env),
            "if": self.condition,
            "shell": self.shell,
            "working-directory": self.working_directory,
            "continue-on-error": self.continue_on_error,
            "timeout-minutes": self.timeout_minutes,
        }


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class JobView:
    id: int
    run_id: str
    run_attempt: int
    repo: str
    name: str
    labels: tuple[str, ...]
    #: queued, in_progress or completed.
    status: str
    #: success, failure or cancelled; None until the job has completed.
    conclusion: str | None
    runner_id: int | None
    runner_name: str | None
    event: str
    #: 0 if the job is not assigned to a scale set.
    scale_set_id: int
    #: Id of the job in the messages of scale sets.
    message_job_id: str
    #: Assignments that no runner took.
    lapses: int
    created_at: str
    started_at: str | None
    completed_at: str | None
    log: str
    steps: tuple[JobStep, ...]
    outputs: Mapping[str, str]
    #: Markdown of the steps' summaries.
    summary: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunnerView:
    id: int
    scope: str
    name: str
    labels: tuple[str, ...]
    ephemeral: bool
    online: bool
    busy: bool
    #: registered, idle, assigned, busy or offline.
    state: str
    job_id: int | None
    version: str | None
    scale_set_id: int
    created_at: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ScaleSetView:
    id: int
    scope: str
    name: str
    labels: tuple[str, ...]
    #: Empty if there is no session.
    session_owner: str
    #: None if none was announced in this session.
    capacity: int | None
    assigned: int
    runners: int
    #: Delivered messages that were not acknowledged.
    unacknowledged: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FaultView:
    id: int
    kind: str
    operation: str
    times: int | None
    status: int | None
    message: str | None
    seconds: float | None
    runner: str | None
    value: int | None


class FakeGitHubClient:
    def __init__(self, url: str, token: str) -> None:
        self._http = httpx.AsyncClient(
            base_url=url,
            headers={"authorization": f"Bearer {token}"},
            timeout=ANSWER_LIMIT_S,
            trust_env=False,  # a local server needs no proxy
            # An empty TLS context: loading the certificate authorities takes longer than a request.
            verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._http.aclose()

    async def queue_job(
        self,
        *,
        repo: str,
        run_id: int | str,
        labels: Sequence[str],
        run_attempt: int = 1,
        name: str = "job",
        steps: Sequence[JobStep] = (),
        env: Mapping[str, str] | None = None,
        event: str = "push",
        workflow: str = "",
        head_repo: str = "",
        contexts: Mapping[str, Any] | None = None,
        outputs: Mapping[str, str] | None = None,
        checkout: Mapping[str, str] | None = None,
    ) -> JobView:
        """Queue a job. `contexts` are those of its expressions, `outputs` the expressions of its outputs."""
        body = {
            "repo": repo,
            "run_id": run_id,
            "run_attempt": run_attempt,
            "name": name,
            "labels": list(labels),
            "steps": [step.document() for step in steps],
            "env": dict(env or {}),
            "event": event,
            "workflow": workflow,
            "head_repo": head_repo,
            "contexts": dict(contexts or {}),
            "outputs": dict(outputs or {}),
            "checkout": dict(checkout or {}),
        }
        return _job(await self._call("POST", "/_admin/jobs", body=body))

    async def job(
        self, job_id: int, *, wait_s: float = 0.0, since: str | None = None, since_scale_set: int | None = None
    ) -> JobView:
        """Return the job. With `wait_s`, wait until its status differs from `since` (default: the current status).

        With `since_scale_set`, the wait also ends when the job is assigned to another scale set.
        """
        wanted = {"wait": wait_s, "since": since, "since_scale_set": since_scale_set}
        query = {name: str(value) for name, value in wanted.items() if value is not None}
        return _job(await self._call("GET", f"/_admin/jobs/{job_id}", query=query, wait_s=wait_s))

    async def jobs(self, *, run_id: int | str | None = None, repo: str | None = None) -> list[JobView]:
        wanted = {"run_id": run_id, "repo": repo}
        query = {name: str(value) for name, value in wanted.items() if value is not None}
        answer = await self._call("GET", "/_admin/jobs", query=query)
        return [_job(document) for document in answer["jobs"]]

    async def cancel_job(self, job_id: int) -> JobView:
        return _job(await self._call("POST", f"/_admin/jobs/{job_id}/cancel"))

    async def put_run(
        self, *, repo: str, run_id: int | str, run_attempt: int, event: str = "push", conclusion: str | None = None
    ) -> None:
        """Begin an attempt of a workflow run, or end it with its conclusion.

        Without this, the fake knows a run by its queued jobs only, and calls it completed between two of them.
        """
        body = {
            "repo": repo,
            "run_id": run_id,
            "run_attempt": run_attempt,
            "event": event,
            "conclusion": conclusion,
        }
        await self._call("POST", "/_admin/runs", body=body)

    async def runners(self) -> list[RunnerView]:
        return (await self.watch_runners())[1]

    async def watch_runners(self, *, since: int | None = None, wait_s: float = 0.0) -> tuple[int, list[RunnerView]]:
        """Return the state's version and the runners. With both arguments, wait for the next change first."""
        query = {} if since is None else {"since": str(since), "wait": str(wait_s)}
        answer = await self._call("GET", "/_admin/runners", query=query, wait_s=wait_s)
        return answer["version"], [_runner(document) for document in answer["runners"]]

    async def scale_sets(self) -> list[ScaleSetView]:
        return (await self.watch_scale_sets())[1]

    async def watch_scale_sets(
        self, *, since: int | None = None, wait_s: float = 0.0
    ) -> tuple[int, list[ScaleSetView]]:
        """Return the state's version and the scale sets. With both arguments, wait for the next change first."""
        query = {} if since is None else {"since": str(since), "wait": str(wait_s)}
        answer = await self._call("GET", "/_admin/scale-sets", query=query, wait_s=wait_s)
        found = [ScaleSetView(**{**each, "labels": tuple(each["labels"])}) for each in answer["scale_sets"]]
        return answer["version"], found

    async def delete_scale_set(self, set_id: int) -> None:
        """Delete a scale set as GitHub itself does with dormant ones, even if a runner is busy."""
        await self._call("DELETE", f"/_admin/scale-sets/{set_id}")

    async def open_session(self, set_id: int, *, owner: str = "another") -> None:
        """Open a session as another process, which then never uses it."""
        await self._call("POST", f"/_admin/scale-sets/{set_id}/session", body={"owner": owner})

    async def end_session(self, set_id: int) -> None:
        """End the session of a scale set without its owner's request."""
        await self._call("DELETE", f"/_admin/scale-sets/{set_id}/session")

    async def rerun_failed_jobs(self, *, repo: str, run_id: int | str) -> None:
        """Run the failed jobs of a completed run again, as part of a new attempt."""
        await self._call("POST", f"/repos/{repo}/actions/runs/{run_id}/rerun-failed-jobs")

    async def rerun_job(self, *, repo: str, job_id: int) -> None:
        await self._call("POST", f"/repos/{repo}/actions/jobs/{job_id}/rerun")

    async def set_fault(
        self,
        kind: str,
        *,
        operation: str = "*",
        times: int | None = 1,
        status: int | None = None,
        message: str | None = None,
        seconds: float | None = None,
        runner: str | None = None,
        value: int | None = None,
    ) -> FaultView:
        body = {
            "kind": kind,
            "operation": operation,
            "times": times,
            "status": status,
            "message": message,
            "seconds": seconds,
            "runner": runner,
            "value": value,
        }
        return FaultView(**await self._call("POST", "/_admin/faults", body=body))

    async def faults(self) -> list[FaultView]:
        answer = await self._call("GET", "/_admin/faults")
        return [FaultView(**document) for document in answer["faults"]]

    async def clear_faults(self) -> None:
        await self._call("DELETE", "/_admin/faults")

    async def change_settings(self, **settings: Any) -> dict[str, Any]:
        """Change any fields of `FakeGitHubSettings`. Return all settings."""
        return await self._call("PATCH", "/_admin/settings", body=settings)

    async def issue_token(self, *, scopes: Sequence[str] = (), permissions: Mapping[str, str] | None = None) -> str:
        """Issue an access token for these scopes, or for all if empty.

        `permissions` are "read" or "write" by kind, such as {"actions": "read"}; None stands for all permissions.
        """
        body = {"scopes": list(scopes), "permissions": None if permissions is None else dict(permissions)}
        answer = await self._call("POST", "/_admin/tokens", body=body)
        return str(answer["token"])

    async def permit_id_tokens(self, *, repository: str, run_id: str, **claims: str) -> dict[str, str]:
        """Return the variables with which the steps of a job request OIDC tokens. `claims` are fields of `OidcJob`."""
        return await self._call(
            "POST", "/_admin/oidc-jobs", body={"repository": repository, "run_id": run_id, **claims}
        )

    async def _call(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        wait_s: float = 0.0,
    ) -> dict[str, Any]:
        response = await self._http.request(method, path, params=query, json=body, timeout=ANSWER_LIMIT_S + wait_s)
        document: dict[str, Any] = response.json() if response.content else {}
        if response.is_error:
            raise FakeGitHubError(response.status_code, str(document.get("message", "")))
        return document


def _job(document: dict[str, Any]) -> JobView:
    steps = tuple(JobStep(**step) for step in document["steps"])
    return JobView(**{**document, "labels": tuple(document["labels"]), "steps": steps})


def _runner(document: dict[str, Any]) -> RunnerView:
    return RunnerView(**{**document, "labels": tuple(document["labels"])})
