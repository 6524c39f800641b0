"""Access control of the dashboard: token, session cookie, Host header check and security headers for every route."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

SESSION_COOKIE = "remuda_session"
LOGIN_PATH = "/login"
#: Files of the sign-in page; served without a token.
PUBLIC_PATHS = frozenset({LOGIN_PATH, "/login.js", "/style.css", "/icon.svg"})
#: Paths that pages of other sites must not request.
SAME_SITE_PATHS = ("/api/", "/metrics")
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'self'"
)
SECURITY_HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}


class AccessToken:
    """The dashboard's token, kept as digests and compared in constant time."""

    def __init__(self, text: str) -> None:
        self._digest = _digest(text)
        # The cookie's value is derived from the token, so that a stolen cookie does not reveal the token.
        self.session = hmac.new(text.encode(), b"remuda dashboard session", hashlib.sha256).hexdigest()
        self._session_digest = _digest(self.session)

    def __repr__(self) -> str:
        return "AccessToken(hidden)"

    def matches(self, text: str) -> bool:
        return hmac.compare_digest(_digest(text), self._digest)

    def admits(self, headers: Headers) -> bool:
        scheme, _, credential = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self.matches(credential.strip()):
            return True
        # Starlette's lenient parser: a malformed cookie of another site must not hide ours.
        session = cookie_parser(headers.get("cookie", "")).get(SESSION_COOKIE, "")
        return hmac.compare_digest(_digest(session), self._session_digest)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode(errors="replace")).digest()


def is_loopback(host: str) -> bool:
    return host == "localhost" or ipaddress.ip_address(host).is_loopback


def is_loopback_host(header: str) -> bool:
    """Whether a Host header names the loopback interface. Any other name may be a DNS rebinding attack."""
    host = header.strip()
    host = host.partition("]")[0].removeprefix("[") if host.startswith("[") else host.partition(":")[0]
    try:
        return is_loopback(host.lower())
    except ValueError:
        return False


class AccessControl:
    """ASGI middleware: checks Host header, method and token, and adds the security headers to every response."""

    def __init__(self, app: ASGIApp, *, token: AccessToken | None, loopback: bool) -> None:
        self._app = app
        self._token = token
        self._loopback = loopback

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    headers[name] = value
                headers.setdefault("cache-control", "no-store")
            await send(message)

        rejection = self._rejection(scope)
        await (rejection or self._app)(scope, receive, send_with_headers)

    def _rejection(self, scope: Scope) -> Response | None:
        headers, path, method = Headers(scope=scope), scope["path"], scope["method"]
        # With a token, any host name is accepted: a reverse proxy may forward its own name.
        if self._loopback and self._token is None and not is_loopback_host(headers.get("host", "")):
            return _error(421, "without a token, the dashboard answers only to localhost and 127.0.0.1")
        if headers.get("sec-fetch-site") == "cross-site" and path.startswith(SAME_SITE_PATHS):
            return _error(403, "cross-site requests are not allowed")
        if method not in {"GET", "HEAD"} and not (method == "POST" and path == LOGIN_PATH):
            return _error(405, "the dashboard is read-only")
        if self._token is None or path in PUBLIC_PATHS or self._token.admits(headers):
            return None
        if path == "/":
            return RedirectResponse(LOGIN_PATH, status_code=303)
        response = _error(401, "sign in, or send the token in an Authorization: Bearer header")
        response.headers["www-authenticate"] = 'Bearer realm="remuda"'
        return response


def _error(code: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message}}, status_code=code)
