"""The repository of a smoke run on GitHub: branches with a workflow, and the runs that a push of them starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from remuda.domain.errors import RemudaError, Unavailable

PREFIX = "remuda-smoke-"
TIMEOUT_S = 30.0
_HEADERS = {"Accept": "application/vnd.github+json", "X-GitHub-Api-Version": "2022-11-28", "User-Agent": "remuda-smoke"}


@dataclass(frozen=True, kw_only=True, slots=True)
class PushedRun:
    run_id: int
    status: str
    conclusion: str | None

    @property
    def is_done(self) -> bool:
        return self.status == "completed"


class SmokeRepository:
    """Calls of GitHub's REST API (docs.github.com/rest): git database, workflow runs."""

    def __init__(self, *, api_url: str, repository: str, token: str) -> None:
        self._http = httpx.AsyncClient(
            base_url=f"{api_url}/repos/{repository}/",
            headers={**_HEADERS, "Authorization": f"Bearer {token}"},
            timeout=TIMEOUT_S,
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def identity(self) -> str:
        """The repository with its ids, as in immutable subject claims: owner@id/name@id."""
        found = await self._call("GET", "")
        owner = found["owner"]
        return f"{owner['login']}@{owner['id']}/{found['name']}@{found['id']}"

    async def push(self, branch: str, files: Mapping[str, str]) -> str:
        """Create the branch, or move it, to a new commit with these files alone. Return the commit.

        One update of one branch, because every push starts the workflow.
        """
        tree = [
            {"path": path, "mode": "100755" if path.endswith(".sh") else "100644", "type": "blob", "content": content}
            for path, content in files.items()
        ]
        made = await self._call("POST", "git/trees", json={"tree": tree})
        commit = await self._call(
            "POST", "git/commits", json={"message": "Smoke run of Remuda", "tree": made["sha"], "parents": []}
        )
        sha = str(commit["sha"])
        if branch in await self.branches(branch):
            await self._call("PATCH", f"git/refs/heads/{branch}", json={"sha": sha, "force": True})
        else:
            await self._call("POST", "git/refs", json={"ref": f"refs/heads/{branch}", "sha": sha})
        return sha

    async def branches(self, prefix: str = PREFIX) -> list[str]:
        found = await self._call("GET", f"git/matching-refs/heads/{prefix}")
        return [str(each["ref"]).removeprefix("refs/heads/") for each in found]

    async def delete_branch(self, branch: str) -> None:
        # 422: "Reference does not exist".
        await self._call("DELETE", f"git/refs/heads/{branch}", accept=(404, 422))

    async def run_of(self, commit: str) -> PushedRun | None:
        """The run of a push, which appears some seconds after it."""
        found = await self._call("GET", "actions/runs", params={"head_sha": commit, "event": "push"})
        for each in found["workflow_runs"]:
            return _run(each)
        return None

    async def run(self, run_id: int) -> PushedRun:
        return _run(await self._call("GET", f"actions/runs/{run_id}"))

    async def jobs(self, run_id: int) -> dict[str, tuple[str, str | None]]:
        """Status and conclusion of each job."""
        found = await self._call("GET", f"actions/runs/{run_id}/jobs")
        return {str(each["name"]): (str(each["status"]), each["conclusion"]) for each in found["jobs"]}

    async def open_runs(self, branch: str) -> list[PushedRun]:
        found = await self._call("GET", "actions/runs", params={"branch": branch, "per_page": "100"})
        return [run for run in map(_run, found["workflow_runs"]) if not run.is_done]

    async def cancel(self, run_id: int) -> None:
        # 409: it is completed or being cancelled.
        await self._call("POST", f"actions/runs/{run_id}/cancel", accept=(409,))

    async def _call(self, method: str, path: str, *, accept: tuple[int, ...] = (), **options: Any) -> Any:
        try:
            response = await self._http.request(method, path, **options)
        except httpx.HTTPError as error:
            raise Unavailable(f"GitHub: {method} {path}: {type(error).__name__}") from None
        if response.is_success:
            return response.json() if response.content else None
        if response.status_code in accept:
            return None
        message = str(response.json().get("message", "")) if "json" in response.headers.get("content-type", "") else ""
        raise RemudaError(f"GitHub: {method} {path} failed with {response.status_code}: {message[:200]}")


def _run(document: Mapping[str, Any]) -> PushedRun:
    return PushedRun(run_id=int(document["id"]), status=str(document["status"]), conclusion=document.get("conclusion"))
