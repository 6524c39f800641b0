"""Calls of a smoke run to GitHub, on a fake of its git database and workflow runs."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from remuda.domain.errors import RemudaError, Unavailable
from tests.smoke.repository import SmokeRepository

BRANCH = "remuda-smoke-smoke-1"


class FakeGitDatabase:
    """Branches, and a workflow run per push. Refuses what GitHub refuses: unknown objects, branches that exist."""

    def __init__(self) -> None:
        self.trees: dict[str, Any] = {}
        self.commits: dict[str, Any] = {}
        self.branches: dict[str, str] = {"main": "sha-main"}
        self.runs: list[dict[str, Any]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.headers["Authorization"] != "Bearer ghp_token":
            return httpx.Response(401, json={"message": "Bad credentials"})
        path = request.url.path.removeprefix("/repos/octo/demo/")
        body = json.loads(request.content) if request.content else {}
        answer = self._git(request.method, path, body) or self._actions(request.method, path, request.url.params)
        return answer or httpx.Response(404, json={"message": "Not Found"})

    def _git(self, method: str, path: str, body: Any) -> httpx.Response | None:
        match method, path.split("/"):
            case "POST", ["git", "trees"]:
                if not body["tree"]:
                    return httpx.Response(422, json={"message": "Invalid tree info"})
                sha = f"tree{len(self.trees)}"
                self.trees[sha] = {each["path"]: each for each in body["tree"]}
                return httpx.Response(201, json={"sha": sha})
            case "POST", ["git", "commits"]:
                if body["tree"] not in self.trees:
                    return httpx.Response(422, json={"message": "Tree SHA does not exist"})
                sha = f"commit{len(self.commits)}"
                self.commits[sha] = body
                return httpx.Response(201, json={"sha": sha})
            case "POST", ["git", "refs"]:
                name = body["ref"].removeprefix("refs/heads/")
                if name in self.branches:
                    return httpx.Response(422, json={"message": "Reference already exists"})
                return self._pushed(name, body["sha"], 201)
            case "PATCH", ["git", "refs", "heads", name]:
                if name not in self.branches or not body["force"]:
                    return httpx.Response(422, json={"message": "Update is not a fast forward"})
                return self._pushed(name, body["sha"], 200)
            case "DELETE", ["git", "refs", "heads", name]:
                if self.branches.pop(name, None) is None:
                    return httpx.Response(422, json={"message": "Reference does not exist"})
                return httpx.Response(204)
            case "GET", ["git", "matching-refs", "heads", prefix]:
                return httpx.Response(
                    200, json=[{"ref": f"refs/heads/{name}"} for name in self.branches if name.startswith(prefix)]
                )
            case "GET", [""] | ["/repos", "octo", "demo"]:
                return httpx.Response(200, json={"id": 2, "name": "demo", "owner": {"login": "octo", "id": 1}})
        return None

    def _actions(self, method: str, path: str, params: httpx.QueryParams) -> httpx.Response | None:
        match method, path.split("/"):
            case "GET", ["actions", "runs"]:
                found = [run for run in self.runs if params.get("head_sha") in {None, run["head_sha"]}]
                found = [run for run in found if params.get("branch") in {None, run["head_branch"]}]
                return httpx.Response(200, json={"total_count": len(found), "workflow_runs": found})
            case "GET", ["actions", "runs", number, "jobs"]:
                assert int(number) < len(self.runs)
                jobs = [{"name": "test", "status": "completed", "conclusion": "success"}]
                return httpx.Response(200, json={"jobs": jobs})
            case "GET", ["actions", "runs", number]:
                return httpx.Response(200, json=self.runs[int(number)])
            case "POST", ["actions", "runs", number, "cancel"]:
                if self.runs[int(number)]["status"] == "completed":
                    return httpx.Response(409, json={"message": "Cannot cancel a workflow run that is completed."})
                self.runs[int(number)]["status"] = "completed"
                return httpx.Response(202, json={})
        return None

    def _pushed(self, name: str, sha: str, status: int) -> httpx.Response:
        if sha not in self.commits:
            return httpx.Response(422, json={"message": "Object does not exist"})
        self.branches[name] = sha
        number = len(self.runs)
        run = {"id": number, "head_sha": sha, "head_branch": name, "status": "queued", "conclusion": None}
        self.runs.append(run)
        return httpx.Response(status, json={"ref": f"refs/heads/{name}"})


@pytest.fixture
def github() -> FakeGitDatabase:
    return FakeGitDatabase()


@pytest.fixture
def repository(github) -> SmokeRepository:
    made = SmokeRepository(api_url="https://api.github.com", repository="octo/demo", token="ghp_token")
    made._http._transport = httpx.MockTransport(github)
    return made


async def test_every_push_starts_one_run_with_the_files_alone(github, repository):
    first = await repository.push(BRANCH, {"a.txt": "1", "run.sh": "2"})
    second = await repository.push(BRANCH, {"a.txt": "3"})
    assert [run["head_sha"] for run in github.runs] == [first, second]
    tree = github.trees[github.commits[first]["tree"]]
    assert {path: (each["mode"], each["content"]) for path, each in tree.items()} == {
        "a.txt": ("100644", "1"),
        "run.sh": ("100755", "2"),
    }
    assert github.commits[second]["parents"] == []
    found = await repository.run_of(second)
    assert found is not None
    assert found.run_id == 1
    assert await repository.run_of("unknown") is None


async def test_runs_are_cancelled_and_branches_deleted_twice_without_an_error(github, repository):
    await repository.push(BRANCH, {"a.txt": "1"})
    (run,) = await repository.open_runs(BRANCH)
    await repository.cancel(run.run_id)
    await repository.cancel(run.run_id)
    assert (await repository.run(run.run_id)).is_done
    assert await repository.open_runs(BRANCH) == []
    assert await repository.jobs(run.run_id) == {"test": ("completed", "success")}
    assert await repository.branches() == [BRANCH]
    await repository.delete_branch(BRANCH)
    await repository.delete_branch(BRANCH)
    assert github.branches == {"main": "sha-main"}


async def test_the_identity_has_the_ids_of_immutable_subject_claims(repository):
    assert await repository.identity() == "octo@1/demo@2"


async def test_errors_name_the_call_and_not_the_token(repository):
    with pytest.raises(RemudaError, match="POST git/trees failed with 422: Invalid tree info"):
        await repository.push(BRANCH, {})
    repository._http.headers["Authorization"] = "Bearer ghp_wrong"
    with pytest.raises(RemudaError, match="failed with 401: Bad credentials") as error:
        await repository.branches()
    assert "ghp_" not in str(error.value)


async def test_a_lost_connection_is_an_error_of_its_own(repository):
    def lose(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("no route", request=request)

    repository._http._transport = httpx.MockTransport(lose)
    with pytest.raises(Unavailable, match="ConnectError"):
        await repository.branches()
