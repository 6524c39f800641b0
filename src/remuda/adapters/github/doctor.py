"""Doctor checks of GitHub."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from remuda.adapters.github import responses
from remuda.adapters.github.client import GitHubClient
from remuda.domain.errors import UserError
from remuda.http import ClientResponse
from remuda.ports.clock import Clock
from remuda.ports.doctor import Check, CheckResult, compare_clocks, ok, problem, warning

ACCESS = "github access"
#: The doctor warns if less than one part in this many of the hourly rate limit is left.
LOW_DIVISOR = 10


class GitHubDoctor:
    """Checks of GitHub: credential, access to the scope, rate limit and clock difference."""

    def __init__(
        self,
        *,
        github: Callable[[], Awaitable[GitHubClient]],
        scope: str,
        clock: Clock,
        needs: tuple[str, ...] = (),
    ) -> None:
        """`github` opens the client. It raises if there is no usable credential."""
        self._github = github
        self._scope = scope
        self._clock = clock
        self._needs = needs
        self._response: ClientResponse | None = None

    def checks(self) -> Sequence[Check]:
        return (
            Check(name="github credential", run=self._credential, needs=self._needs),
            Check(name=ACCESS, run=self._access, needs=("github credential",)),
            Check(name="github rate limit", run=self._rate_limit, needs=(ACCESS,)),
            Check(name="github clock", run=self._clocks, needs=(ACCESS,)),
        )

    async def _credential(self) -> CheckResult:
        github = await self._github()
        return ok(github.credential_description)

    async def _access(self) -> CheckResult:
        if not self._scope:
            raise UserError("no scope is configured", fix="set --github-scope to an organisation or owner/repo")
        _, count = responses.parse_runner_page(responses.json_object(await self._first_page()))
        return ok(f"{self._scope} is accessible, {count} runners registered")

    async def _first_page(self) -> ClientResponse:
        if self._response is None:
            self._response = await (await self._github()).first_runner_response(self._scope)
        return self._response

    async def _rate_limit(self) -> CheckResult:
        headers = (await self._first_page()).headers
        try:
            left, limit = int(headers["x-ratelimit-remaining"]), int(headers["x-ratelimit-limit"])
        except (KeyError, ValueError):
            # GitHub Enterprise Server may have no rate limit.
            return ok("no rate limit")
        found = f"{left} of {limit} calls left this hour"
        if left == 0:
            return problem(found, "wait for the next hour, or use a GitHub App, which has a higher limit")
        if left * LOW_DIVISOR < limit:
            return warning(found, "check what else uses this credential, or use a GitHub App, which has a higher limit")
        return ok(found)

    async def _clocks(self) -> CheckResult:
        return compare_clocks("GitHub", (await self._first_page()).headers.get("date", ""), self._clock)
