"""REST API of GitHub Apps: the installation for a scope, and installation access tokens."""

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from remuda.fake_github.app_state import AppState, bearer, error_response
from remuda.fake_github.model import ApiError
from remuda.fake_github.rest import PREFIXES, SCOPES, Handler, timestamp

#: GitHub's limit for the lifetime of an App's JSON web token, and the tolerated clock difference, in seconds.
MAX_LIFETIME_S = 600
LEEWAY_S = 5


def routes(app: AppState) -> list[BaseRoute]:
    api = AppsRest(app)
    table: list[tuple[str, str, str, Handler]] = [
        *(("GET", f"{scope}/installation", "installation", api.installation) for scope in SCOPES),
        ("POST", "/app/installations/{installation_id:int}/access_tokens", "installation-token", api.access_token),
    ]
    return [
        Route(f"{prefix}{path}", api.endpoint(operation, answer), methods=[method])
        for prefix in PREFIXES
        for method, path, operation, answer in table
    ]


class AppsRest:
    def __init__(self, app: AppState) -> None:
        self._app = app
        self._core = app.core

    def endpoint(self, operation: str, answer: Handler) -> Any:
        async def handle(request: Request) -> Response:
            response = await self._app.apply_faults_before(operation)
            if response is None:
                try:
                    self._check_app(bearer(request))
                    response = answer(request, "", {})
                except ApiError as problem:
                    response = error_response(problem.status, problem.message)
                self._app.commit_changes()
            return self._app.apply_faults_after(operation, response)

        return handle

    def installation(self, request: Request, _scope: str, _body: dict[str, Any]) -> Response:
        owner = str(request.path_params.get("org") or request.path_params["owner"])
        owners = [name.lower() for name in self._core.state.settings.app_owners]
        if owner.lower() not in owners:
            raise ApiError(404, "Not Found")
        number = owners.index(owner.lower()) + 1
        app = self._core.state.settings.app_id
        return JSONResponse({"id": number, "account": {"login": owner}, "app_id": int(app) if app.isdecimal() else 0})

    def access_token(self, request: Request, _scope: str, _body: dict[str, Any]) -> Response:
        number, owners = int(request.path_params["installation_id"]), self._core.state.settings.app_owners
        if not 1 <= number <= len(owners):
            raise ApiError(404, "Not Found")
        token = self._core.registry.issue_installation(owners[number - 1])
        return JSONResponse({"token": token.value, "expires_at": timestamp(token.expires_at)}, status_code=201)

    def _check_app(self, token: str) -> None:
        import jwt  # noqa: PLC0415 - an optional dependency that the demo does not need

        settings = self._core.state.settings
        undecodable = ApiError(401, "A JSON web token could not be decoded")
        if not settings.app_id or not settings.app_key:
            raise undecodable
        try:
            # Times are checked below, with the injected clock.
            claims = jwt.decode(
                token, settings.app_key, algorithms=["RS256"], options={"verify_exp": False, "verify_iat": False}
            )
            issued, expires = int(claims["iat"]), int(claims["exp"])
        except (jwt.PyJWTError, KeyError, TypeError, ValueError):
            raise undecodable from None
        now = self._core.clock.now()
        if str(claims.get("iss")) != settings.app_id:
            raise undecodable
        if issued > now + LEEWAY_S:
            raise ApiError(401, "'Issued at' claim ('iat') must be an Integer representing a time in the past")
        if expires <= now:
            raise ApiError(401, "'Expiration time' claim ('exp') is in the past")
        if expires - now > MAX_LIFETIME_S:
            raise ApiError(401, "'Expiration time' claim ('exp') is too far in the future")
