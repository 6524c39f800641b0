"""OIDC issuer for the jobs of workflows, with the paths and claims of a GitHub Enterprise Server.

Sources: "OpenID Connect reference" and "OpenID Connect" in GitHub's documentation, and `getIDToken` of actions/toolkit.
Keys and jobs are kept in memory: a restarted server has new ones.
"""

import hashlib
import secrets
from functools import cached_property
from typing import Any, Literal

import pydantic
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from remuda.fake_github.app_state import AppState, bearer
from remuda.fake_github.state import ApiError

ISSUER_PATH = "/_services/token"
#: Seconds that a job may request tokens: the time limit of a hosted job.
JOB_LIFE_S = 6 * 3600.0
#: Seconds before its issue from which a token is valid.
BACKDATED_S = 600
MAX_AUDIENCE = 1_000
ALGORITHM = "RS256"
#: Events whose subject is `pull_request`.
PULL_REQUEST = "pull_request"


class OidcJob(pydantic.BaseModel):
    """A job with the permission `id-token: write`."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, coerce_numbers_to_str=True)
    repository: str = pydantic.Field(pattern=r"^[^/\s]+/[^/\s]+$")
    run_id: str = pydantic.Field(pattern=r"^[0-9]{1,20}$")
    run_attempt: str = pydantic.Field(default="1", pattern=r"^[0-9]{1,9}$")
    run_number: str = "1"
    event_name: str = "workflow_dispatch"
    ref: str = "refs/heads/main"
    sha: str = pydantic.Field(default="0" * 40, pattern=r"^[0-9a-f]{40}$")
    workflow: str = "workflow"
    workflow_file: str = ".github/workflows/workflow.yml"
    actor: str = "octocat"
    head_ref: str = ""
    base_ref: str = ""
    environment: str = ""
    repository_visibility: Literal["public", "private", "internal"] = "private"
    runner_environment: Literal["github-hosted", "self-hosted"] = "github-hosted"

    def claims(self) -> dict[str, str]:
        """The claims about the job."""
        owner, name = self.repository.split("/")
        workflow_ref = f"{self.repository}/{self.workflow_file}@{self.ref}"
        environment = {"environment": self.environment} if self.environment else {}
        return {
            "sub": f"repo:{owner}/{name}:{self._context()}",
            "ref": self.ref,
            "sha": self.sha,
            "repository": self.repository,
            "repository_owner": owner,
            "repository_owner_id": number_of(owner),
            "repository_id": number_of(self.repository),
            "repository_visibility": self.repository_visibility,
            "run_id": self.run_id,
            "run_number": self.run_number,
            "run_attempt": self.run_attempt,
            "actor": self.actor,
            "actor_id": number_of(self.actor),
            "workflow": self.workflow,
            "workflow_ref": workflow_ref,
            "workflow_sha": self.sha,
            "head_ref": self.head_ref,
            "base_ref": self.base_ref,
            "event_name": self.event_name,
            "ref_type": "tag" if self.ref.startswith("refs/tags/") else "branch",
            "ref_protected": "false",
            "job_workflow_ref": workflow_ref,
            "job_workflow_sha": self.sha,
            "runner_environment": self.runner_environment,
            **environment,
        }

    def _context(self) -> str:
        # Colons in the values are escaped.
        if self.environment:
            return f"environment:{self.environment.replace(':', '%3A')}"
        if self.event_name == PULL_REQUEST:
            return PULL_REQUEST
        return f"ref:{self.ref.replace(':', '%3A')}"


class OidcIssuer:
    def __init__(self, app: AppState) -> None:
        self._app = app
        self._clock = app.core.clock
        #: Job, request token and end of the permission, by the job's id in the request URL.
        self._jobs: dict[str, tuple[OidcJob, str, float]] = {}

    def routes(self) -> list[BaseRoute]:
        return [
            Route(f"{ISSUER_PATH}/.well-known/openid-configuration", self._configuration, methods=["GET"]),
            Route(f"{ISSUER_PATH}/.well-known/jwks", self._public_keys, methods=["GET"]),
            Route("/_services/pipelines/jobs/{job}/idtoken", self._request_token, methods=["GET"]),
        ]

    def permit(self, job: OidcJob, server_url: str) -> dict[str, str]:
        """Return the variables with which the steps of the job request tokens."""
        number, token = self._clock.token(""), self._clock.token("job-")
        self._jobs[number] = (job, token, self._clock.now() + JOB_LIFE_S)
        return {
            "ACTIONS_ID_TOKEN_REQUEST_URL": f"{server_url}/_services/pipelines/jobs/{number}/idtoken?api-version=2.0",
            "ACTIONS_ID_TOKEN_REQUEST_TOKEN": token,
        }

    async def _request_token(self, request: Request) -> Response:
        async def answer() -> Response:
            job, token, ends = self._jobs.get(str(request.path_params["job"]), (None, "", 0.0))
            if job is None or not secrets.compare_digest(bearer(request), token) or self._clock.now() >= ends:
                raise ApiError(401, "Bad credentials")
            owner = job.repository.split("/")[0]
            audience = request.query_params.get("audience") or f"{_server_url(request)}/{owner}"
            if len(audience) > MAX_AUDIENCE:
                raise ApiError(400, "The audience is too long.")
            return JSONResponse({"value": self.sign(job, audience=audience, server_url=_server_url(request))})

        return await self._app.respond("id-token", answer)

    def sign(self, job: OidcJob, *, audience: str, server_url: str) -> str:
        import jwt  # noqa: PLC0415 - an optional dependency that the demo does not need

        now = int(self._clock.now())
        claims = {
            "jti": self._clock.token(""),
            "aud": audience,
            **job.claims(),
            "iss": f"{server_url}{ISSUER_PATH}",
            "nbf": now - BACKDATED_S,
            "exp": now + int(self._app.core.state.settings.id_token_life_s),
            "iat": now,
        }
        return jwt.encode(claims, self._key, algorithm=ALGORITHM, headers={"kid": self._key_id})

    async def _configuration(self, request: Request) -> Response:
        issuer = f"{_server_url(request)}{ISSUER_PATH}"
        example = OidcJob(repository="owner/name", run_id="1", environment="any")
        return JSONResponse(
            {
                "issuer": issuer,
                "jwks_uri": f"{issuer}/.well-known/jwks",
                "subject_types_supported": ["public", "pairwise"],
                "response_types_supported": ["id_token"],
                "claims_supported": ["aud", "exp", "iat", "iss", "jti", "nbf", *example.claims()],
                "id_token_signing_alg_values_supported": [ALGORITHM],
                "scopes_supported": ["openid"],
            }
        )

    async def _public_keys(self, _request: Request) -> Response:
        from jwt.algorithms import RSAAlgorithm  # noqa: PLC0415 - as above

        key: dict[str, Any] = RSAAlgorithm.to_jwk(self._key.public_key(), as_dict=True)
        public = {name: key[name] for name in ("kty", "n", "e")}
        return JSONResponse({"keys": [{**public, "alg": ALGORITHM, "use": "sig", "kid": self._key_id}]})

    @cached_property
    def _key(self) -> Any:
        from cryptography.hazmat.primitives.asymmetric import rsa  # noqa: PLC0415 - as above

        return rsa.generate_private_key(public_exponent=65537, key_size=2048)

    @cached_property
    def _key_id(self) -> str:
        return self._clock.token("").upper()


def _server_url(request: Request) -> str:
    return str(request.base_url).rstrip("/")


def number_of(name: str) -> str:
    """A stable id for a name."""
    return str(int.from_bytes(hashlib.sha256(name.lower().encode()).digest()[:4]))
