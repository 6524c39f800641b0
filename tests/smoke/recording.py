"""Recorder of requests and answers of AWS and GitHub, by hooks of botocore, httpx and Remuda's own clients.

`python -m tests.smoke.recording FILE ARGUMENTS…` runs the `remuda` command with these arguments and writes its redacted
recording to the file. Nothing is written before it is redacted.
"""

from __future__ import annotations

import copy
import gzip
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
from aiobotocore.session import AioSession
from botocore.exceptions import ClientError

from remuda.adapters.aws.service import ServiceClient
from remuda.http import ClientResponse, HttpConnections
from tests.smoke.redaction import Redactor

#: Variables of the recording process: the key of the replacements, and names to replace as a JSON object.
KEY_VARIABLE, NAMES_VARIABLE = "REMUDA_SMOKE_KEY", "REMUDA_SMOKE_NAMES"
#: Variables with credentials.
CREDENTIALS = ("REMUDA_GITHUB_TOKEN", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
#: Key of the parameters of a call in botocore's context of the call.
PARAMETERS = "smoke_parameters"
#: Longer bodies are downloads and uploads of bundles.
MAX_BODY_CHARS = 100_000
#: Schemes of GitHub's credentials. Requests to AWS are signed and recorded as calls; those to IMDS have no such header.
_GITHUB_SCHEMES = ("bearer ", "token ", "remoteauth ")
#: Requests whose answers are credentials.
_UNRECORDED = frozenset({"AssumeRole", "AssumeRoleWithWebIdentity", "GetSessionToken", "GetRoleCredentials"})


class ExchangeRecorder:
    """Exchanges of this process, kept in memory until they are redacted."""

    def __init__(self, redactor: Redactor) -> None:
        self._redactor = redactor
        self._exchanges: list[dict[str, Any]] = []

    def install(self) -> None:
        """Record the calls of all clients that are created from now on."""
        recorder = self
        create_session, create_http, call_service = AioSession.__init__, httpx.AsyncClient.__init__, ServiceClient.call
        request_http = HttpConnections.request

        def session_init(session: AioSession, *arguments: Any, **options: Any) -> None:
            create_session(session, *arguments, **options)
            session.register("before-parameter-build.*.*", recorder._on_parameters)
            session.register("response-received.*.*", recorder._on_aws_response)

        def http_init(client: httpx.AsyncClient, *arguments: Any, **options: Any) -> None:
            create_http(client, *arguments, **options)
            client.event_hooks["response"].append(recorder._on_http_response)

        async def service_call(client: ServiceClient, operation: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
            try:
                answer = await call_service(client, operation, parameters)
            except ClientError as error:
                recorder.on_call(client.name, operation, parameters, error.response)
                raise
            recorder.on_call(client.name, operation, parameters, answer)
            return answer

        async def http_request(
            client: HttpConnections,
            method: str,
            target: str,
            *,
            headers: Mapping[str, str] | None = None,
            body: bytes = b"",
            timeout_s: float | None = None,
        ) -> ClientResponse:
            response = await request_http(client, method, target, headers=headers, body=body, timeout_s=timeout_s)
            named = {name.lower(): value for name, value in (headers or {}).items()}
            if named.get("authorization", "").lower().startswith(_GITHUB_SCHEMES):
                recorder.on_github_response(f"{method} {client.url.rstrip('/')}{target}", body, response)
            return response

        setattr(HttpConnections, "request", http_request)  # noqa: B010
        setattr(ServiceClient, "call", service_call)  # noqa: B010 - mypy refuses the assignment
        setattr(AioSession, "__init__", session_init)  # noqa: B010
        setattr(httpx.AsyncClient, "__init__", http_init)  # noqa: B010

    def on_call(self, service: str, operation: str, request: Mapping[str, Any], answer: Mapping[str, Any]) -> None:
        """Record a call of Remuda's own client."""
        if operation in _UNRECORDED:
            return
        status = answer["ResponseMetadata"]["HTTPStatusCode"]
        self.add(
            service=service,
            operation=operation,
            request=copy.deepcopy(dict(request)),
            status=status,
            answer=dict(answer),
        )

    def _on_parameters(self, params: Mapping[str, Any], context: dict[str, Any], **_: object) -> None:
        readable = {name: "<stream>" if hasattr(value, "read") else value for name, value in params.items()}
        context[PARAMETERS] = copy.deepcopy(readable)

    def _on_aws_response(
        self,
        response_dict: Mapping[str, Any] | None,
        parsed_response: Mapping[str, Any] | None,
        context: Mapping[str, Any],
        event_name: str,
        **_: Any,
    ) -> None:
        service, operation = event_name.split(".", 2)[1:]
        if operation in _UNRECORDED or response_dict is None:
            return
        answer = {key: value for key, value in (parsed_response or {}).items() if not hasattr(value, "read")}
        self.add(
            service=service,
            operation=operation,
            request=context.get(PARAMETERS),
            status=response_dict["status_code"],
            answer=answer,
        )

    async def _on_http_response(self, response: httpx.Response) -> None:
        request = response.request
        length = int(response.headers.get("content-length", "0"))
        body = b"" if length > MAX_BODY_CHARS else await response.aread()
        self._add_http(
            f"{request.method} {request.url}",
            request.content if request.method != "GET" else b"",
            response.status_code,
            response.headers,
            "<large>" if length > MAX_BODY_CHARS else body.decode("utf-8", "replace"),
        )

    def on_github_response(self, operation: str, request: bytes, response: ClientResponse) -> None:
        """Record a request of Remuda's own client to GitHub."""
        compressed = response.headers.get("content-encoding", "") == "gzip"
        body = gzip.decompress(response.body) if compressed and response.body else response.body
        self._add_http(operation, request, response.status, response.headers, body.decode("utf-8", "replace"))

    def _add_http(self, operation: str, request: bytes, status: int, headers: Mapping[str, str], text: str) -> None:
        self.add(
            service="http",
            operation=operation,
            request=request.decode("utf-8", "replace") or None,
            status=status,
            answer=text if len(text) <= MAX_BODY_CHARS else "<large>",
            headers={
                name: value
                for name, value in headers.items()
                if name.startswith(("x-ratelimit", "x-github-request", "link", "retry-after"))
            },
        )

    def add(self, **exchange: Any) -> None:
        self._exchanges.append(exchange)

    def take(self) -> list[Any]:
        """The redacted exchanges so far; they are forgotten."""
        exchanges, self._exchanges = self._exchanges, []
        for exchange in exchanges:
            self._redactor.learn(exchange)
        return [self._redactor.redact(exchange) for exchange in exchanges]


def redactor_from(environment: Mapping[str, str]) -> Redactor:
    return Redactor(
        key=bytes.fromhex(environment[KEY_VARIABLE]),
        secrets=[environment[name] for name in CREDENTIALS if environment.get(name)],
        names=json.loads(environment.get(NAMES_VARIABLE) or "{}"),
    )


def main(arguments: Sequence[str]) -> int:
    from remuda.cli.main import main as run_cli  # noqa: PLC0415 - after the hooks

    file, *command = arguments
    recorder = ExchangeRecorder(redactor_from(os.environ))
    recorder.install()
    try:
        return run_cli(command)
    finally:
        Path(file).write_text(json.dumps(recorder.take(), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
