"""AWS Lambda test server: signed `Invoke` requests and function URLs, with functions in warm worker processes.

It refuses what AWS refuses: unsigned or wrongly signed requests, unknown session tokens, calls that the caller's policy
does not allow, unknown functions, and more concurrent invocations than a function or the account may have.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from typing import IO, Any

from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from remuda.adapters.system.clock import SystemClock
from tests.support.aws.servers import LOOPBACK, REGION
from tests.support.iam import ACCOUNT, IamRequest, allows

#: Limit of a synchronous request in bytes.
MAX_BODY = 6 * 1024 * 1024
#: Tolerated difference of clocks in seconds.
MAX_SKEW_S = 300
ALGORITHM = "AWS4-HMAC-SHA256"
_AUTHORIZATION = re.compile(
    rf"{ALGORITHM} Credential=(?P<key>[^/]+)/(?P<date>\d{{8}})/(?P<region>[^/]+)/(?P<service>[^/]+)/aws4_request, ?"
    r"SignedHeaders=(?P<signed>[a-z0-9;-]+), ?Signature=(?P<signature>[0-9a-f]{64})"
)
_INVOKE = re.compile(r"/2015-03-31/functions/([A-Za-z0-9_-]+)/invocations")
_SETTINGS = "/2016-08-19/account-settings"
_URL = re.compile(r"/function-url/([A-Za-z0-9_-]+)/")

#: Like Lambda's runtime: imports the handler once, then handles one event after the other. Results are written to the
#: file descriptor in the last argument, because standard output is the function's log.
RUNTIME = """
import importlib, json, logging, os, sys, time, traceback
sys.path[:0] = [sys.argv[1]] if sys.argv[1] else []
results = os.fdopen(int(sys.argv[3]), "w")
logging.basicConfig(level=os.environ.get("AWS_LAMBDA_LOG_LEVEL", "WARNING"))
module, _, name = sys.argv[2].rpartition(".")
handler = getattr(importlib.import_module(module), name)

class Context:
    def __init__(self, invocation):
        self.aws_request_id = invocation["id"]
        self._deadline = time.monotonic() + invocation["timeout_s"]
    def get_remaining_time_in_millis(self):
        return max(0, int((self._deadline - time.monotonic()) * 1000))

for line in sys.stdin:
    invocation = json.loads(line)
    try:
        text = json.dumps({"result": handler(invocation["event"], Context(invocation))})
    except Exception as error:
        trace = traceback.format_exception(error)
        sys.stderr.write("".join(trace))
        text = json.dumps({"errorMessage": str(error), "errorType": type(error).__name__, "stackTrace": trace})
    sys.stdout.flush()
    results.write(text + "\\n")
    results.flush()
"""


class AwsError(Exception):
    """A refused request, with AWS's status and error type."""

    def __init__(self, status: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind


@dataclass(frozen=True, kw_only=True)
class AssumedRole:
    """Temporary credentials and the policy of their role."""

    key: str
    secret: str
    session_token: str
    policy: Mapping[str, Any] | Sequence[Mapping[str, Any]]

    def environment(self) -> dict[str, str]:
        return {
            "AWS_ACCESS_KEY_ID": self.key,
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_SESSION_TOKEN": self.session_token,
        }


@dataclass(kw_only=True)
class LambdaFunction:
    name: str
    #: Such as `package.module.handler`.
    handler: str
    environment: Mapping[str, str]
    #: The unpacked package. Empty: the packages of this Python.
    folder: str = ""
    timeout_s: float = 60.0
    concurrency: int = 10
    has_url: bool = False
    _workers: list[LambdaWorker] = field(default_factory=list)
    _idle: list[LambdaWorker] = field(default_factory=list)
    _running: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    #: The log of all workers.
    log: Path = Path(os.devnull)

    def invoke(self, event: Any, request_id: str) -> dict[str, Any]:
        """The result, or the error document of the runtime. Raises `AwsError` if the function is throttled."""
        with self._lock:
            if self._running >= self.concurrency:
                raise AwsError(429, "TooManyRequestsException", "Rate Exceeded.")
            self._running += 1
            worker = self._idle.pop() if self._idle else None
        try:
            worker = worker or self._start()
            answer = worker.invoke(event, request_id, self.timeout_s)
            if worker.is_alive:
                with self._lock:
                    self._idle.append(worker)
            return answer
        finally:
            with self._lock:
                self._running -= 1

    @property
    def running(self) -> int:
        """Number of current invocations."""
        return self._running

    def warm_up(self) -> None:
        """Start a worker, so that the next invocation finds the handler imported."""
        self._idle.append(self._start())

    def stop(self) -> None:
        """End all workers, also those of current invocations."""
        for worker in self._workers:
            worker.stop()

    def close(self) -> None:
        """After the last invocation."""
        for worker in self._workers:
            worker.close()

    def _start(self) -> LambdaWorker:
        worker = LambdaWorker(self)
        with self._lock:
            self._workers.append(worker)
        return worker


class LambdaWorker:
    """An execution environment: a process that handles one invocation at a time."""

    def __init__(self, function: LambdaFunction) -> None:
        readable, writable = os.pipe()
        isolation = ["-I", "-S"] if function.folder else []
        with function.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, *isolation, "-c", RUNTIME, function.folder, function.handler, str(writable)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=(writable,),
                env={**function.environment, "AWS_LAMBDA_FUNCTION_NAME": function.name},
                start_new_session=True,
            )
        os.close(writable)
        self._results: IO[str] = os.fdopen(readable)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def invoke(self, event: Any, request_id: str, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdin is not None
        timer = threading.Timer(timeout_s, self._process.kill)
        timer.start()
        try:
            line = json.dumps({"event": event, "id": request_id, "timeout_s": timeout_s})
            with suppress(BrokenPipeError):
                self._process.stdin.write(line.encode() + b"\n")
                self._process.stdin.flush()
            answer = self._results.readline()
        finally:
            timer.cancel()
        if answer:
            document: dict[str, Any] = json.loads(answer)
            return document
        code = self._process.wait()
        if code == -signal.SIGKILL:
            return {
                "errorType": "Sandbox.Timedout",
                "errorMessage": f"RequestId: {request_id} Error: Task timed out after {timeout_s:.2f} seconds",
            }
        message = f"RequestId: {request_id} Error: Runtime exited with error: exit status {code}"
        return {"errorType": "Runtime.ExitError", "errorMessage": message}

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        self._results.close()
        with suppress(BrokenPipeError):
            if self._process.stdin is not None:
                self._process.stdin.close()


class LambdaServer:
    """Functions and callers, behind one HTTP server."""

    def __init__(self, folder: Path, account: str = ACCOUNT) -> None:
        self.folder = folder
        self.account = account
        self.functions: dict[str, LambdaFunction] = {}
        #: Concurrent executions of the account, which its functions share.
        self.concurrency = 1_000
        self.roles: dict[str, AssumedRole] = {}
        #: Operations in the events of all invocations.
        self.operations: list[str] = []
        #: Times of all requests, by the monotonic clock.
        self.arrivals: list[float] = []
        #: Operations whose next connection is closed without a response. The function runs to its end.
        self.cut: list[str] = []
        self.cut_requests: list[threading.Thread] = []
        self._numbers = count(1)
        self._http = ThreadingHTTPServer((LOOPBACK, 0), _handler(self))
        # Closing the server waits for the requests in progress.
        self._http.daemon_threads = False
        self.url = f"http://{LOOPBACK}:{self._http.server_address[1]}"

    def add(self, function: LambdaFunction) -> LambdaFunction:
        """Add a function, or replace the one with its name."""
        if replaced := self.functions.get(function.name):
            replaced.stop()
            replaced.close()
        function.log = self.folder / f"{function.name}.log"
        self.functions[function.name] = function
        return function

    def assume(self, role: AssumedRole) -> AssumedRole:
        self.roles[role.key] = role
        return role

    def function_url(self, name: str) -> str:
        return f"{self.url}/function-url/{name}/"

    def serve(self) -> None:
        self._http.serve_forever(poll_interval=0.05)

    def stop(self) -> None:
        self._http.shutdown()
        for function in self.functions.values():
            function.stop()
        self._http.server_close()
        for thread in self.cut_requests:
            thread.join()
        for function in self.functions.values():
            function.close()

    # Requests

    def invoke(self, request: LambdaRequest) -> LambdaResponse:
        found = _INVOKE.fullmatch(request.path)
        if found is None:
            raise AwsError(404, "UnknownOperationException", "")
        role = self._caller(request)
        arn = f"arn:aws:lambda:{REGION}:{self.account}:function:{found[1]}"
        if not allows(role.policy, IamRequest(action="lambda:InvokeFunction", resource=arn)):
            raise AwsError(
                403,
                "AccessDeniedException",
                f"User: {role.key} is not authorized to perform: lambda:InvokeFunction on resource: {arn}",
            )
        if found[1] not in self.functions:
            raise AwsError(404, "ResourceNotFoundException", f"Function not found: {arn}")
        try:
            event = json.loads(request.body)
        except ValueError as error:
            raise AwsError(
                400, "InvalidRequestContentException", f"Could not parse request body into json: {error}"
            ) from None
        answer = self._run(self.functions[found[1]], event, event)
        if "errorType" in answer:
            return LambdaResponse(body=answer, headers={"X-Amz-Function-Error": "Unhandled"})
        return LambdaResponse(body=answer["result"])

    def account_settings(self, request: LambdaRequest) -> LambdaResponse:
        role = self._caller(request)
        if not allows(role.policy, IamRequest(action="lambda:GetAccountSettings", resource="*")):
            message = f"User: {role.key} is not authorized to perform: lambda:GetAccountSettings on resource: *"
            raise AwsError(403, "AccessDeniedException", message)
        limit = {"ConcurrentExecutions": self.concurrency, "UnreservedConcurrentExecutions": self.concurrency}
        return LambdaResponse(body={"AccountLimit": limit, "AccountUsage": {"FunctionCount": len(self.functions)}})

    def call_url(self, request: LambdaRequest) -> LambdaResponse:
        """Like a function URL with authentication type NONE: an event in payload format 2.0."""
        found = _URL.fullmatch(request.path)
        function = self.functions.get(found[1]) if found else None
        if function is None or not function.has_url:
            return LambdaResponse(status=403, body={"Message": "Forbidden"})
        event = {
            "version": "2.0",
            "routeKey": "$default",
            "rawPath": "/",
            "rawQueryString": "",
            "headers": request.headers,
            "requestContext": {"http": {"method": request.method, "path": "/", "protocol": "HTTP/1.1"}},
            "body": request.body.decode(),
            "isBase64Encoded": False,
        }
        try:
            answer = self._run(function, event, json.loads(request.body or b"{}"))
        except AwsError as error:
            return LambdaResponse(status=error.status, body={"Reason": "", "Type": "User", "message": str(error)})
        if "errorType" in answer:
            return LambdaResponse(status=502, body={"Message": "Internal Server Error"})
        result = answer["result"]
        if isinstance(result, dict) and "statusCode" in result:
            return LambdaResponse(status=int(result["statusCode"]), text=result.get("body", ""))
        return LambdaResponse(body=result)

    def _run(self, function: LambdaFunction, event: Any, content: Any) -> dict[str, Any]:
        operation = str(content.get("operation", "")) if isinstance(content, dict) else ""
        if sum(each.running for each in self.functions.values()) >= self.concurrency:
            raise AwsError(429, "TooManyRequestsException", "Rate Exceeded.")
        self.operations.append(operation)
        return function.invoke(event, f"request-{next(self._numbers)}")

    def _caller(self, request: LambdaRequest) -> AssumedRole:
        """The role whose credentials signed the request, by the rules of Signature Version 4."""
        given = _AUTHORIZATION.fullmatch(request.headers.get("authorization", ""))
        if given is None:
            raise AwsError(403, "MissingAuthenticationTokenException", "Missing Authentication Token")
        role = self.roles.get(given["key"])
        if role is None or request.headers.get("x-amz-security-token", "") != role.session_token:
            raise AwsError(403, "UnrecognizedClientException", "The security token included in the request is invalid.")
        signed = given["signed"].split(";")
        # Host and all headers of AWS must be signed.
        required = {"host", *(name for name in request.headers if name.startswith("x-amz-"))}
        if not required <= set(signed) or "x-amz-date" not in signed:
            raise AwsError(403, "InvalidSignatureException", f"These headers must be signed: {sorted(required)}")
        if (given["region"], given["service"]) != (REGION, "lambda"):
            raise AwsError(403, "InvalidSignatureException", "Credential should be scoped to a valid region.")
        sent = datetime.strptime(request.headers["x-amz-date"], "%Y%m%dT%H%M%S%z")
        if abs((SystemClock().now() - sent).total_seconds()) > MAX_SKEW_S:
            raise AwsError(403, "InvalidSignatureException", "Signature expired")
        if _signature(request, role, signed) != given["signature"]:
            raise AwsError(
                403,
                "InvalidSignatureException",
                "The request signature we calculated does not match the signature you provided.",
            )
        return role


@dataclass(frozen=True, kw_only=True)
class LambdaRequest:
    method: str
    path: str
    #: With names in lower case.
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True, kw_only=True)
class LambdaResponse:
    status: int = 200
    body: Any = None
    #: The body, if it is a text.
    text: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def content(self) -> bytes:
        return (json.dumps(self.body) if self.text is None else self.text).encode()


def _signature(request: LambdaRequest, role: AssumedRole, signed: Sequence[str]) -> str:
    headers = {name: request.headers[name] for name in signed}
    url = f"http://{request.headers['host']}{request.path}"
    rebuilt = AWSRequest(method=request.method, url=url, headers=headers, data=request.body)
    rebuilt.context["timestamp"] = request.headers["x-amz-date"]
    auth = SigV4Auth(Credentials(role.key, role.secret, role.session_token), "lambda", REGION)
    text = auth.string_to_sign(rebuilt, auth.canonical_request(rebuilt))
    return str(auth.signature(text, rebuilt))


def _handler(server: LambdaServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            server.arrivals.append(SystemClock().monotonic())
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            headers = {name.lower(): value for name, value in self.headers.items()}
            request = LambdaRequest(method="POST", path=self.path, headers=headers, body=body)
            if self._is_cut(body):
                thread = threading.Thread(target=self._answer, args=(request,))
                server.cut_requests.append(thread)
                thread.start()
                # Without the wait for data that the client may still send.
                self.connection.shutdown(socket.SHUT_RDWR)
                self.close_connection = True
                return
            self._respond(self._answer(request))

        def do_GET(self) -> None:
            headers = {name.lower(): value for name, value in self.headers.items()}
            self._respond(self._answer(LambdaRequest(method="GET", path=self.path, headers=headers, body=b"")))

        def _answer(self, request: LambdaRequest) -> LambdaResponse:
            if len(request.body) > MAX_BODY:
                return _error(AwsError(413, "RequestTooLargeException", "The request body is too large."))
            try:
                if (request.method, request.path) == ("GET", _SETTINGS):
                    return server.account_settings(request)
                return server.call_url(request) if _URL.fullmatch(request.path) else server.invoke(request)
            except AwsError as error:
                return _error(error)

        def _respond(self, response: LambdaResponse) -> None:
            content = response.content()
            # The client may have been interrupted meanwhile.
            with suppress(BrokenPipeError, ConnectionResetError):
                self.send_response(response.status)
                for name, value in {**response.headers, "Content-Length": str(len(content))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

        def _is_cut(self, body: bytes) -> bool:
            with suppress(ValueError):
                operation = json.loads(body).get("operation")
                if operation in server.cut:
                    server.cut.remove(operation)
                    return True
            return False

        def log_message(self, *_: object) -> None:
            """Write nothing."""

    return Handler


def _error(error: AwsError) -> LambdaResponse:
    body = {"Type": "User", "Message": str(error)}
    return LambdaResponse(status=error.status, body=body, headers={"x-amzn-ErrorType": error.kind})


@contextmanager
def lambda_server(folder: Path, account: str = ACCOUNT) -> Iterator[LambdaServer]:
    folder.mkdir(parents=True, exist_ok=True)
    server = LambdaServer(folder, account)
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join()
