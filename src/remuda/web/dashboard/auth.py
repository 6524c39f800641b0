"""Who may see the page, and what a browser may do with it. Around every route."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

COOKIE = "remuda_session"
LOGIN = "/login"
#: What the sign-in page is made of: it must be there for those who have not signed in.
OPEN_PATHS = frozenset({LOGIN, "/login.js", "/style.css", "/icon.svg"})
#: What no other site's page has reason to ask for, in whoever's browser.
GUARDED_PATHS = ("/api/", "/metrics")
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'self'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}


class Token:
    """Held as digests: it is compared in constant time, whatever its length, and shown nowhere."""

    def __init__(self, text: str) -> None:
        self._digest = _digest(text)
        # What the browser keeps opens this page alone, and does not tell the token.
        self.session = hmac.new(text.encode(), b"remuda dashboard session", hashlib.sha256).hexdigest()
        self._session_digest = _digest(self.session)

    def __repr__(self) -> str:
        return "Token(hidden)"

    def is_given(self, text: str) -> bool:
        return hmac.compare_digest(_digest(text), self._digest)

    def admits(self, headers: Headers) -> bool:
        scheme, _, credential = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self.is_given(credential.strip()):
            return True
        # As browsers write them: another page's odd cookie hides none of the others.
        held = cookie_parser(headers.get("cookie", "")).get(COOKIE, "")
        return hmac.compare_digest(_digest(held), self._session_digest)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode(errors="replace")).digest()


def is_loopback(host: str) -> bool:
    return host == "localhost" or ipaddress.ip_address(host).is_loopback


def names_loopback(header: str) -> bool:
    """Whether a Host header names this machine: another name that leads here is somebody's trick."""
    host = header.strip()
    host = host.partition("]")[0].removeprefix("[") if host.startswith("[") else host.partition(":")[0]
    try:
        return is_loopback(host.lower())
    except ValueError:
        return False


class Guard:
    """Middleware: the Host header, the method, the token, and headers on every answer."""

    def __init__(self, app: ASGIApp, *, token: Token | None, loopback: bool) -> None:
        self._app = app
        self._token = token
        self._loopback = loopback

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("cache-control", "no-store")
            await send(message)

        refusal = self._refusal(scope)
        await (refusal or self._app)(scope, receive, send_guarded)

    def _refusal(self, scope: Scope) -> Response | None:
        headers, path, method = Headers(scope=scope), scope["path"], scope["method"]
        # With a token it is the token that counts: a proxy may come by another name.
        if self._loopback and self._token is None and not names_loopback(headers.get("host", "")):
            return _refused(421, "this page answers to localhost and 127.0.0.1 alone; with a token, to any name")
        if headers.get("sec-fetch-site") == "cross-site" and path.startswith(GUARDED_PATHS):
            return _refused(403, "another site's page may not ask for this")
        if method not in {"GET", "HEAD"} and not (method == "POST" and path == LOGIN):
            return _refused(405, "this page is read-only")
        if self._token is None or path in OPEN_PATHS or self._token.admits(headers):
            return None
        if path == "/":
            return RedirectResponse(LOGIN, status_code=303)
        response = _refused(401, "sign in first, or send the token as a bearer")
        response.headers["www-authenticate"] = 'Bearer realm="remuda"'
        return response


def _refused(code: int, sentence: str) -> Response:
    return JSONResponse({"error": {"message": sentence}}, status_code=code)
