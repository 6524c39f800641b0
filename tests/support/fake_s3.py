"""A fake S3 for downloads with signed requests. botocore computes the signatures that it expects."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from tests.support.user_data import serve

_AUTHORIZATION = re.compile(
    r"AWS4-HMAC-SHA256 Credential=([^/]+)/([0-9]{8})/([a-z0-9-]+)/s3/aws4_request, ?"
    r"SignedHeaders=([a-z0-9;-]+), ?Signature=([0-9a-f]{64})"
)
#: S3 refuses requests in which they are not signed.
_SIGNED = frozenset({"host", "x-amz-content-sha256", "x-amz-date", "x-amz-security-token"})


class FakeS3:
    def __init__(self, region: str, find_credentials: Callable[[str], Mapping[str, str] | None]) -> None:
        """`find_credentials` returns AccessKeyId, SecretAccessKey and Token for the id of a key."""
        self.region = region
        #: By path: `/bucket/key`, encoded as in the request.
        self.objects: dict[str, bytes] = {}
        self.requests: list[str] = []
        #: Status of the answer to a request for another region. Newer regions answer 400.
        self.redirect = 301
        #: Number of requests to refuse.
        self.failures = 0
        self.url = ""
        self._find_credentials = find_credentials

    def answer(self, path: str, headers: Mapping[str, str]) -> tuple[int, dict[str, str], bytes]:
        self.requests.append(path)
        if self.failures:
            self.failures -= 1
            return _error(503, "SlowDown", "Please reduce your request rate.")
        found = _AUTHORIZATION.fullmatch(headers.get("authorization", ""))
        if found is None:
            return _error(403, "AccessDenied", "Access Denied")
        key, _, region, signed, signature = found.groups()
        if region != self.region:
            element = f"<Region>{self.region}</Region>" if self.redirect == 400 else ""
            name = "AuthorizationHeaderMalformed" if self.redirect == 400 else "PermanentRedirect"
            more = {} if self.redirect == 400 else {"x-amz-bucket-region": self.region}
            return _error(self.redirect, name, "Use the region of the bucket.", more=element, headers=more)
        credentials = self._find_credentials(key)
        if credentials is None or headers["x-amz-security-token"] != credentials["Token"]:
            return _error(403, "InvalidAccessKeyId", "The AWS Access Key Id you provided does not exist.")
        sent = {name: headers[name] for name in signed.split(";")}
        if not set(sent) >= _SIGNED or signature != self._signature(path, sent, credentials):
            return _error(403, "SignatureDoesNotMatch", "The request signature we calculated does not match.")
        if path not in self.objects:
            return _error(404, "NoSuchKey", "The specified key does not exist.")
        return 200, {}, self.objects[path]

    def _signature(self, path: str, headers: Mapping[str, str], credentials: Mapping[str, str]) -> str:
        request = AWSRequest("GET", f"http://{headers['host']}{path}", headers=dict(headers))
        request.context["timestamp"] = headers["x-amz-date"]
        keys = Credentials(credentials["AccessKeyId"], credentials["SecretAccessKey"], credentials["Token"])
        signer = S3SigV4Auth(keys, "s3", self.region)
        text = signer.string_to_sign(request, signer.canonical_request(request))
        return str(signer.signature(text, request))


def _error(
    status: int, code: str, message: str, *, more: str = "", headers: dict[str, str] | None = None
) -> tuple[int, dict[str, str], bytes]:
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message>{more}</Error>"
    return status, headers or {}, body.encode()


@contextmanager
def fake_s3(
    region: str,
    find_credentials: Callable[[str], Mapping[str, str] | None],
    listening: socket.socket | None = None,
) -> Iterator[FakeS3]:
    """Run the server on a listening socket, or on loopback."""
    s3 = FakeS3(region, find_credentials)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            headers = {name.lower(): value for name, value in self.headers.items()}
            status, sent, body = s3.answer(self.path, headers)
            self.send_response(status)
            for name, value in {**sent, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_line: object) -> None:
            """Write no access log."""

    with serve(Handler, listening) as url:
        s3.url = url
        yield s3
