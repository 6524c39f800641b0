"""Tokens, registrations and sessions of runners, and the core that combines them with the job queue."""

import base64
import json

from remuda.fake_github.faults import FaultBoard
from remuda.fake_github.jobs import JobQueue
from remuda.fake_github.scale_sets import ScaleSets
from remuda.fake_github.state import (
    DEFAULT_LABELS,
    MAX_LABEL_LENGTH,
    MAX_LABELS,
    MAX_NAME_LENGTH,
    OFFLINE_EPHEMERAL_LIFE_S,
    OFFLINE_RUNNER_LIFE_S,
    ApiError,
    FakeGitHubSettings,
    GitHubState,
    IssuedToken,
    JobPhase,
    RegisteredRunner,
    ScaleSet,
    TokenClock,
    TokenKind,
    is_older,
)

ACCESS_PREFIX = "github_pat_"
INSTALLATION_PREFIX = "ghs_"
DEFAULT_GROUP = "Default"
DEFAULT_GROUP_ID = 1


class Registry:
    def __init__(self, state: GitHubState, queue: JobQueue) -> None:
        self._state = state
        self._queue = queue
        #: Number of open long polls per session. A session with an open poll is alive.
        self._polls: dict[str, int] = {}

    # Tokens

    def issue(self, kind: TokenKind, scope: str) -> IssuedToken:
        now = self._state.clock.now()
        self._forget_expired(now)
        token = IssuedToken(
            value=self._state.clock.token("A").upper(),
            kind=kind,
            scopes=(scope,),
            expires_at=now + self._state.settings.token_life_s,
        )
        return self._keep(token)

    def issue_access(self, *, scopes: tuple[str, ...] = (), permissions: dict[str, str] | None = None) -> IssuedToken:
        value = self._state.clock.token(ACCESS_PREFIX)
        return self._keep(
            IssuedToken(value=value, kind=TokenKind.ACCESS, scopes=scopes, expires_at=None, permissions=permissions)
        )

    def issue_installation(self, owner: str) -> IssuedToken:
        """Issue a token of an App for one owner that has installed it."""
        now = self._state.clock.now()
        self._forget_expired(now)
        value = self._state.clock.token(INSTALLATION_PREFIX)
        expires_at = now + self._state.settings.token_life_s
        return self._keep(
            IssuedToken(
                value=value,
                kind=TokenKind.ACCESS,
                scopes=(owner,),
                expires_at=expires_at,
                permissions=self._state.settings.app_permissions,
            )
        )

    def issue_service(self, kind: TokenKind, *scopes: str, life_s: float) -> IssuedToken:
        """Issue a token of the Actions service: a JSON web token, of which clients read the expiry."""
        now = self._state.clock.now()
        self._forget_expired(now)
        expires_at = float(int(now + life_s))
        claims = {"exp": int(expires_at), "nbf": int(now), "jti": self._state.clock.token("")}
        parts = ({"alg": "RS256", "typ": "JWT"}, claims)
        value = ".".join([*(_b64url(json.dumps(part)) for part in parts), _b64url(self._state.clock.token(""))])
        return self._keep(IssuedToken(value=value, kind=kind, scopes=scopes, expires_at=expires_at))

    def service_scopes(self, value: str, kind: TokenKind) -> tuple[str, ...]:
        """Return the scopes of a token of the Actions service."""
        token = self._state.tokens.get(value)
        if token is None or token.kind is not kind or (token.expires_at or 0.0) <= self._state.clock.now():
            raise ApiError(401, "The token is expired or invalid.")
        return token.scopes

    def check_registration_token(self, value: str, scope: str) -> None:
        self._check(value, TokenKind.REGISTRATION, scope)

    def keep_access(self, value: str) -> None:
        """Accept this access token, which an earlier run of the server issued."""
        self._keep(IssuedToken(value=value, kind=TokenKind.ACCESS, scopes=(), expires_at=None))

    def access(self, value: str) -> IssuedToken:
        token = self._state.tokens.get(value)
        expired = token is not None and token.expires_at is not None and token.expires_at <= self._state.clock.now()
        if token is None or token.kind is not TokenKind.ACCESS or expired:
            raise ApiError(401, "Bad credentials")
        return token

    def check_access(self, token: IssuedToken, scope: str, *, permission: str, write: bool) -> None:
        """Refuse a token without access to the scope, or without a kind of permission, such as "actions".

        An empty kind stands for what every token with access may do.
        """
        if not self.knows(scope) or (token.scopes and not _within(scope, token.scopes)):
            raise ApiError(404, "Not Found")
        if token.permissions is None or not permission:
            return
        if token.permissions.get(permission) not in ({"write"} if write else {"read", "write"}):
            raise not_accessible(token)

    def knows(self, scope: str) -> bool:
        known = self._state.settings.known_scopes
        if known is None:
            return True
        names = {name.lower() for name in known}
        owners = {name.split("/")[0] for name in names}
        return scope.lower() in names or ("/" not in scope and scope.lower() in owners)

    def _check(self, value: str, kind: TokenKind, scope: str) -> None:
        token = self._state.tokens.get(value)
        expired = token is not None and token.expires_at is not None and token.expires_at <= self._state.clock.now()
        if token is None or token.kind is not kind or expired or token.scopes[0].lower() != scope.lower():
            raise ApiError(401, "Not Found")  # like GitHub, without details

    def _keep(self, token: IssuedToken) -> IssuedToken:
        self._state.tokens[token.value] = token
        self._state.changed("token", token.value)
        return token

    def _forget_expired(self, now: float) -> None:
        tokens = self._state.tokens.values()
        for value in [t.value for t in tokens if t.expires_at is not None and t.expires_at <= now]:
            del self._state.tokens[value]
            self._state.changed("token", value)

    # Registrations

    def register(
        self,
        *,
        scope: str,
        token: str,
        name: str,
        labels: tuple[str, ...],
        default_labels: bool,
        ephemeral: bool,
        replace: bool,
        group: str = "",
        disable_update: bool = False,
    ) -> RegisteredRunner:
        """Register a runner for `config.sh`. As on GitHub, a replaced runner keeps its id and its old labels."""
        self._check(token, TokenKind.REGISTRATION, scope)
        group_id = self._group_id(scope, group or DEFAULT_GROUP)
        all_labels = (*DEFAULT_LABELS, *labels) if default_labels else labels
        existing = self.find(scope, name)
        if existing is None:
            return self._create(
                scope=scope,
                name=name,
                labels=all_labels,
                ephemeral=ephemeral,
                group_id=group_id,
                disable_update=disable_update,
            )
        if not replace:
            raise ApiError(409, f"A runner exists with the same name {name}.")
        existing.labels = _distinct((*existing.labels, *all_labels))
        existing.ephemeral = ephemeral
        existing.group_id = group_id
        existing.disable_update = disable_update
        self._state.renew_secret(existing, self._state.clock.token("rs_"))
        self.close_session(existing)
        return existing

    def register_jit(self, *, scope: str, name: str, labels: tuple[str, ...], group_id: int) -> RegisteredRunner:
        if self.find(scope, name) is not None:
            raise ApiError(409, "Already exists - A runner with the name already exists.")
        if group_id not in self.groups(scope).values():
            raise ApiError(404, "Not Found")
        return self._create(scope=scope, name=name, labels=labels, ephemeral=True, group_id=group_id)

    def register_for_set(self, scale_set: ScaleSet, name: str) -> RegisteredRunner:
        """Register a runner of a scale set. It has the set's labels and no default labels (rhobuild/runpool#141)."""
        if self.find(scale_set.scope, name) is not None:
            raise ApiError(409, f"The agent {name} exists.", type_name="AgentExistsException")
        return self._create(
            scope=scale_set.scope,
            name=name,
            labels=scale_set.labels,
            ephemeral=True,
            group_id=scale_set.group_id,
            disable_update=scale_set.disable_update,
            scale_set_id=scale_set.id,
        )

    def groups(self, scope: str) -> dict[str, int]:
        """The ids of runner groups by name. Repositories have the default group only."""
        names = () if "/" in scope else self._state.settings.runner_groups
        return {name: number for number, name in enumerate((DEFAULT_GROUP, *names), start=DEFAULT_GROUP_ID)}

    def _group_id(self, scope: str, name: str) -> int:
        for known, group_id in self.groups(scope).items():
            if known.lower() == name.lower():
                return group_id
        # The runner's message; it reads the list of groups itself.
        raise ApiError(422, f'Could not find any self-hosted runner group named "{name}".')

    def remove(self, *, scope: str, token: str, runner_id: int) -> None:
        """Remove a runner for `config.sh remove`."""
        self._check(token, TokenKind.REMOVAL, scope)
        self.delete(scope, runner_id)

    def delete(self, scope: str, runner_id: int) -> None:
        """Delete a runner atomically, unless it has a job."""
        runner = self.get(scope, runner_id)
        if runner.job_id is not None:
            raise ApiError(422, f'Runner "{runner.name}" is currently running a job and cannot be deleted.')
        self._state.drop_runner(runner)

    def get(self, scope: str, runner_id: int) -> RegisteredRunner:
        runner = self._state.runners.get(runner_id)
        if runner is None or runner.scope.lower() != scope.lower():
            raise ApiError(404, "Not Found")
        return runner

    def find(self, scope: str, name: str) -> RegisteredRunner | None:
        return next((runner for runner in self.of(scope) if runner.name.lower() == name.lower()), None)

    def of(self, scope: str) -> list[RegisteredRunner]:
        return [runner for runner in self._state if runner.scope.lower() == scope.lower()]

    def busy(self, runner: RegisteredRunner) -> bool:
        """Whether the REST API reports the runner as busy. A job that is assigned but not picked up does not count."""
        job = self._state.jobs.get(runner.job_id or 0)
        return job is not None and job.phase is JobPhase.IN_PROGRESS

    def _create(
        self,
        *,
        scope: str,
        name: str,
        labels: tuple[str, ...],
        ephemeral: bool,
        group_id: int = DEFAULT_GROUP_ID,
        disable_update: bool = False,
        scale_set_id: int = 0,
    ) -> RegisteredRunner:
        if not 0 < len(name) <= MAX_NAME_LENGTH:
            raise ApiError(422, f"The name of a runner must have 1 to {MAX_NAME_LENGTH} characters.")
        if not 0 < len(labels) <= MAX_LABELS or not all(0 < len(label) <= MAX_LABEL_LENGTH for label in labels):
            raise ApiError(
                422, f"A runner must have 1 to {MAX_LABELS} labels, each with 1 to {MAX_LABEL_LENGTH} characters."
            )
        now = self._state.clock.now()
        runner = RegisteredRunner(
            id=self._state.new_id(),
            scope=scope,
            name=name,
            labels=_distinct(labels),
            os="Linux",
            ephemeral=ephemeral,
            secret=self._state.clock.token("rs_"),
            group_id=group_id,
            disable_update=disable_update,
            scale_set_id=scale_set_id,
            created_at=now,
            offline_since=now,
        )
        self._state.add_runner(runner)
        return runner

    # Sessions

    def runner_of(self, secret: str) -> RegisteredRunner:
        runner = self._state.runner_by_secret(secret)
        if runner is None:
            raise ApiError(410, "The runner registration has been deleted from the server.")
        return runner

    def open_session(self, runner: RegisteredRunner, *, version: str) -> str:
        self.expire()
        if runner.session is not None:
            raise ApiError(409, "A session for this runner already exists.")
        runner.session = self._state.clock.token("session-")
        runner.version = version
        runner.deprecated = is_older(version, self._state.settings.oldest_served_version)
        runner.seen_at = self._state.clock.now()
        self._state.changed("runner", runner.id)
        self._queue.offer(runner)
        return runner.session

    def in_session(self, secret: str, session: str) -> RegisteredRunner:
        """Return the runner of the session and mark it as seen now."""
        runner = self.runner_of(secret)
        if runner.session != session:
            raise ApiError(404, "The session does not exist.")
        runner.seen_at = self._state.clock.now()
        return runner

    def poll_begins(self, session: str) -> None:
        self._polls[session] = self._polls.get(session, 0) + 1

    def poll_ends(self, runner: RegisteredRunner, session: str) -> None:
        left = self._polls.pop(session) - 1
        if left:
            self._polls[session] = left
        runner.seen_at = self._state.clock.now()

    def next_due(self) -> float | None:
        dues = [due for runner in self._state if (due := self._due(runner)) is not None]
        return min(dues, default=None)

    def expire(self) -> None:
        """Close lost sessions and delete runners that were offline for too long."""
        now = self._state.clock.now()
        for runner in [runner for runner in self._state if (self._due(runner) or now + 1) <= now]:
            if runner.session is not None:
                self.close_session(runner)
            elif runner.job_id is None:
                self._state.drop_runner(runner)

    def close_session(self, runner: RegisteredRunner) -> None:
        runner.session = None
        runner.offline_since = self._state.clock.now()
        self._state.changed("runner", runner.id)

    def _due(self, runner: RegisteredRunner) -> float | None:
        if runner.session is None:
            if runner.job_id is not None:
                return None
            life = OFFLINE_EPHEMERAL_LIFE_S if runner.ephemeral else OFFLINE_RUNNER_LIFE_S
            return runner.offline_since + life
        if self._polls.get(runner.session):
            return None
        return runner.seen_at + self._state.settings.liveness_s


class GitHubCore:
    """The fake GitHub without HTTP: registry and job queue over one state. `tick` applies expired deadlines."""

    def __init__(self, *, clock: TokenClock, settings: FakeGitHubSettings | None = None) -> None:
        self.clock = clock
        self.state = GitHubState(clock=clock, settings=settings)
        self.faults = FaultBoard()
        self.queue = JobQueue(self.state)
        self.registry = Registry(self.state, self.queue)
        self.scale_sets = ScaleSets(self.state, self.queue, self.faults)

    def restore(self) -> None:
        """Rebuild what follows from the loaded state."""
        self.queue.restore()
        self.scale_sets.restore()

    def give_job(self, runner: RegisteredRunner) -> None:
        """Assign a new job to this runner, unless it has one."""
        if runner.job_id is not None:
            return
        job = self.queue.add(
            repo=runner.scope if "/" in runner.scope else f"{runner.scope}/any",
            run_id="0",
            run_attempt=1,
            name="job-on-delete",
            labels=runner.labels,
            steps=[{"run": "true"}],
            env={},
            only_runner=runner,
        )
        self.scale_sets.job_given(job)

    def next_due(self) -> float | None:
        """Return the time at which `tick` must be called next, or None."""
        parts = (self.queue, self.registry, self.scale_sets)
        return min((due for part in parts if (due := part.next_due()) is not None), default=None)

    def tick(self) -> None:
        self.registry.expire()
        self.queue.expire()
        self.scale_sets.expire()


def not_accessible(token: IssuedToken) -> ApiError:
    """https://docs.github.com/rest/using-the-rest-api/troubleshooting-the-rest-api#resource-not-accessible."""
    by = "integration" if token.value.startswith(INSTALLATION_PREFIX) else "personal access token"
    return ApiError(403, f"Resource not accessible by {by}")


def _within(scope: str, allowed: tuple[str, ...]) -> bool:
    names = {name.lower() for name in allowed}
    return scope.lower() in names or scope.lower().split("/")[0] in names


def _distinct(labels: tuple[str, ...]) -> tuple[str, ...]:
    return tuple({label.lower(): label for label in reversed(labels)}.values())[::-1]


def _b64url(text: str) -> str:
    return base64.urlsafe_b64encode(text.encode()).rstrip(b"=").decode()
