"""The local GitHub's core: registry and job queue over one state, moved on by `tick`."""

from remuda.fake_github.clock import TokenClock
from remuda.fake_github.jobs import JobQueue
from remuda.fake_github.model import FakeGitHubSettings
from remuda.fake_github.registry import Registry
from remuda.fake_github.state import GitHubState


class GitHubCore:
    def __init__(self, *, clock: TokenClock, settings: FakeGitHubSettings | None = None) -> None:
        self.clock = clock
        self.state = GitHubState(clock=clock, settings=settings)
        self.queue = JobQueue(self.state)
        self.registry = Registry(self.state, self.queue)

    def next_due(self) -> float | None:
        """When `tick` has to be called next, if nothing else happens before."""
        dues = [due for due in (self.queue.next_due(), self.registry.next_due()) if due is not None]
        return min(dues, default=None)

    def tick(self) -> None:
        self.registry.expire()
        self.queue.expire()
