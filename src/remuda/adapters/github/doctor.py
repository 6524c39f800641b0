"""Looks at GitHub: is the credential good for the scope, is enough of the rate limit left, do the clocks agree."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import httpx

from remuda.adapters.github import answers
from remuda.adapters.github.client import GitHubClient
from remuda.domain.errors import UserError
from remuda.ports.clock import Clock
from remuda.ports.doctor import Check, CheckResult, clocks, ok, problem, warning

ACCESS = "github access"
#: Of the hour's calls: with less left a busy pool may run dry.
SCARCE = 0.1


class GithubDoctor:
    def __init__(
        self,
        *,
        github: Callable[[], Awaitable[GitHubClient]],
        scope: str,
        clock: Clock,
        needs: tuple[str, ...] = (),
    ) -> None:
        """`github` opens the client, once; it raises where there is no usable credential."""
        self._github = github
        self._scope = scope
        self._clock = clock
        self._needs = needs
        self._answer: httpx.Response | None = None

    def checks(self) -> Sequence[Check]:
        return (
            Check(name="github credential", look=self._credential, needs=self._needs),
            Check(name=ACCESS, look=self._access, needs=("github credential",)),
            Check(name="github rate limit", look=self._rate_limit, needs=(ACCESS,)),
            Check(name="github clock", look=self._clocks, needs=(ACCESS,)),
        )

    async def _credential(self) -> CheckResult:
        github = await self._github()
        return ok(github.credential_kind)

    async def _access(self) -> CheckResult:
        if not self._scope:
            raise UserError("nobody says which scope", fix="give --github-scope: an organisation or owner/repo")
        answer = await self._asked()
        _, count = answers.page(answers.fields(answer))
        return ok(f"{self._scope} can be reached: {count} runners registered")

    async def _asked(self) -> httpx.Response:
        if self._answer is None:
            self._answer = await (await self._github()).peek(self._scope)
        return self._answer

    async def _rate_limit(self) -> CheckResult:
        headers = (await self._asked()).headers
        try:
            left, limit = int(headers["x-ratelimit-remaining"]), int(headers["x-ratelimit-limit"])
        except (KeyError, ValueError):
            # GitHub Enterprise Server may have none.
            return ok("there is none")
        found = f"{left} of {limit} calls left in this hour"
        if left == 0:
            return problem(found, "wait for the next hour, or use a GitHub App: its limit is higher")
        if left < SCARCE * limit:
            return warning(found, "see who else uses this credential, or use a GitHub App: its limit is higher")
        return ok(found)

    async def _clocks(self) -> CheckResult:
        return clocks("GitHub", (await self._asked()).headers.get("date", ""), self._clock)
