"""The command `bin/Runner.Listener run`: holds a session, receives jobs and runs each in a worker process."""

import json
import os
import select
import signal
import subprocess
import time
from typing import Any, NoReturn

from . import LENGTH_DIGITS
from .credentials import InvalidConfiguration, RunnerSettings, load_secret, load_settings
from .home import TRUE, RunnerHome, check_readable, say, say_error, say_with_time
from .protocol import Call, HttpResponse

OK, TERMINATED, RETRY, UPDATING, UPDATING_AFTER_ONE_JOB, SESSION_CONFLICT, VERSION_DEPRECATED = 0, 1, 2, 3, 4, 5, 7
#: Opts in to the exit code 7 (Runner.Listener/Program.cs, GetRunnerVersionDeprecatedExitCode).
DEPRECATED_EXIT_VARIABLE = "ACTIONS_RUNNER_RETURN_VERSION_DEPRECATED_EXIT_CODE"

POLL_S = 50
#: Seconds to wait for the end of an existing session. The real runner waits for 4 minutes.
CONFLICT_WAIT_S = 8.0
CONFLICT_WAIT_VARIABLE = "FAKE_RUNNER_SESSION_CONFLICT_S"
FIRST_PAUSE_S, LAST_PAUSE_S = 0.05, 2.0
CONNECT_LIMIT_S = 60.0
REPORT_LIMIT_S = 60.0
#: Seconds for which a request is repeated after a signal, if the server is unreachable.
SHUTDOWN_LIMIT_S = 3.0
#: Minimum seconds to wait for a response. A reachable server gets this time even after a signal.
RESPONSE_LIMIT_S = 15.0

RESULTS = {"success": "Succeeded", "failure": "Failed", "cancelled": "Canceled"}
REGISTRATION_DELETED = (
    "Failed to create a session. The runner registration has been deleted from the server, please re-configure. "
    "Runner registrations are automatically deleted for runners that have not connected to the service recently."
)
CHUNK = 64 * 1024
#: Limit of the output that is not sent to the server yet. The oldest part is dropped.
MAX_OUTPUT_CHARS = 256 * 1024
END_LIMIT_S = 8.0


class WorkerProcess:
    """The listener's handle of a worker process."""

    def __init__(self, home: RunnerHome, message: dict[str, Any]) -> None:
        self.job_id: int = message["id"]
        self.job_name: str = message["name"]
        self.result = "failure"  # if the worker ends without a result
        #: Steps, outputs and summary.
        self.report: dict[str, Any] = {}
        self.cancelled = False
        #: Result of a cancelled job. The real runner reports a job that its own shutdown ends as failed.
        self.cancelled_result = "cancelled"
        self._output = ""
        self._partial = b""
        self._process = subprocess.Popen(
            [str(home.programs / "Runner.Worker")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=home.root
        )
        # The job is sent through the pipe because it may hold secrets, and every user can read command lines.
        data = json.dumps(message).encode()
        self._send(b"%0*d" % (LENGTH_DIGITS, len(data)) + data)

    def fileno(self) -> int:
        assert self._process.stdout is not None  # noqa: S101  # opened with PIPE
        return self._process.stdout.fileno()

    def cancel(self, *, shutdown: bool = False) -> None:
        if not self.cancelled:
            self.cancelled = True
            self.cancelled_result = "failure" if shutdown else "cancelled"
            self._send(b"cancel\n")

    def feed(self) -> bool:
        """Read the worker's messages. Return whether it has ended."""
        chunk = os.read(self.fileno(), CHUNK)
        *lines, self._partial = (self._partial + chunk).split(b"\n")
        for line in lines:
            self._handle(json.loads(line))
        if chunk:
            return False
        self.end()
        return True

    def take_output(self) -> str:
        output, self._output = self._output, ""
        return output

    def prepend_output(self, output: str) -> None:
        self._output = output + self._output

    def end(self) -> None:
        """Close the pipes, which cancels a running job, and wait for the process."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._process.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _handle(self, document: dict[str, Any]) -> None:
        self._output = (self._output + document.get("output", ""))[-MAX_OUTPUT_CHARS:]
        if "result" in document:
            self.result = document.pop("result")
            self.report = document

    def _send(self, data: bytes) -> None:
        assert self._process.stdin is not None  # noqa: S101  # opened with PIPE
        try:
            while data:
                data = data[os.write(self._process.stdin.fileno(), data) :]
        except OSError:
            return  # the worker has ended; `feed` notices it


class ListenerExit(Exception):
    """Ends the listener with this exit code."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class FakeListener:
    def __init__(self, home: RunnerHome, settings: RunnerSettings, secret: str) -> None:
        self._home = home
        self._settings = settings
        self._server = settings.server_url_v2
        self._secret = secret
        self._session = ""
        self._renew_s = 1.0
        self._poll: Call | None = None
        self._pause_s = FIRST_PAUSE_S
        self._poll_at = 0.0
        self._worker: WorkerProcess | None = None
        self._renew_at = 0.0
        self._stopping = False
        #: Whether the local configuration is removed at the end.
        self._is_leaving = False
        self._wake, wake_end = os.pipe()
        for end in (self._wake, wake_end):
            os.set_blocking(end, False)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._stop)
        signal.set_wakeup_fd(wake_end, warn_on_full_buffer=False)

    def run(self) -> int:
        try:
            self._open_session()
            say(f"\n√ Connected to GitHub\n\nCurrent runner version: '{self._home.version}'")
            say_with_time("Listening for Jobs")
            while not (self._stopping and self._worker is None):
                self._run_once()
        except ListenerExit as exit_:
            return exit_.code
        finally:
            self._shut_down()
        say("Exiting...")
        return OK

    def _stop(self, *_: object) -> None:
        self._stopping = True

    # The session

    def _open_session(self) -> None:
        wait_s = float(os.environ.get(CONFLICT_WAIT_VARIABLE) or CONFLICT_WAIT_S)
        path = f"/_runner/sessions?wait={wait_s}"
        response = self._request_until_answered(
            "POST", path, {"version": self._home.version}, limit_s=CONNECT_LIMIT_S, wait_s=wait_s
        )
        if response is None:
            raise ListenerExit(OK if self._stopping else RETRY)
        if response.status == 410:
            say(REGISTRATION_DELETED)
            raise ListenerExit(TERMINATED)
        if response.status == 409:
            say(f"A session for this runner already exists.\n{response.message}")
            raise ListenerExit(SESSION_CONFLICT)
        if response.status != 201:
            say(f"Failed to create a session. {response.message}")
            raise ListenerExit(RETRY)
        self._session = response.body["session"]
        self._renew_s = float(response.body["renew_s"])

    def _shut_down(self) -> None:
        if self._poll is not None:
            self._poll.close()
        if self._worker is not None:
            self._worker.end()
        if self._session:
            self._request_until_answered("DELETE", self._path(""), None, limit_s=SHUTDOWN_LIMIT_S)
        if self._is_leaving:
            self._home.forget()

    # One iteration of the loop: wait for a message, the worker, a signal or a timer

    def _run_once(self) -> None:
        if self._stopping and self._worker is not None:
            self._worker.cancel(shutdown=True)
        self._begin_poll()
        sources: list[Any] = [self._wake]
        sources += [source for source in (self._poll, self._worker) if source is not None]
        ready, _, _ = select.select(sources, [], [], self._time_left())
        if self._wake in ready:
            os.read(self._wake, 64)
        if self._poll is not None and self._poll in ready:
            self._read_poll()
        if self._worker is not None and self._worker in ready and self._worker.feed():
            self._finish_job(self._worker)
        if self._worker is not None and time.monotonic() >= self._renew_at:
            self._renew(self._worker)

    def _time_left(self) -> float | None:
        moments = []
        if self._poll is None and self._may_poll():
            moments.append(self._poll_at)
        if self._worker is not None:
            moments.append(self._renew_at)
        return max(0.0, min(moments) - time.monotonic()) if moments else None

    def _may_poll(self) -> bool:
        """Whether to poll for messages. There are none for a job that is being cancelled."""
        return not self._stopping and not (self._worker is not None and self._worker.cancelled)

    def _begin_poll(self) -> None:
        if self._poll is not None or not self._may_poll() or time.monotonic() < self._poll_at:
            return
        try:
            self._poll = Call(
                self._server, "GET", self._path(f"/message?wait={POLL_S}"), secret=self._secret, timeout_s=POLL_S + 30
            )
        except OSError as problem:
            self._poll_later(str(problem))

    def _read_poll(self) -> None:
        assert self._poll is not None  # noqa: S101  # checked by the caller
        try:
            response = self._poll.feed()
        except OSError as problem:
            self._poll.close()
            self._poll = None
            self._poll_later(str(problem))
            return
        if response is not None:
            self._poll = None
            self._take_message(response)

    def _poll_later(self, reason: str) -> None:
        self._home.diagnose("Runner", f"No message: {reason}. Next try in {self._pause_s} s")
        self._poll_at = time.monotonic() + self._pause_s
        self._pause_s = min(LAST_PAUSE_S, self._pause_s * 2)

    def _take_message(self, response: HttpResponse) -> None:
        if response.status == 410:
            # Runner.Listener/Runner.cs, RunAsync, since 2.336.0 (commit 67cbf96ce).
            say_error("The runner no longer exists on the server. Cleaning up local configuration.")
            self._leave(OK, closes_session=False)
        if response.status == 404:
            say_with_time("The session is gone. Creating a new one.")
            self._session = ""
            self._open_session()
            return
        if response.body.get("errorKind") == "RunnerVersionTooOld":
            # Sdk/WebApi/WebApi/BrokerHttpClient.cs, GetRunnerMessageAsync; Runner.Listener/Program.cs, MainAsync.
            say_error(f"An error occurred: {response.body['errorMessage']}")
            opted_in = os.environ.get(DEPRECATED_EXIT_VARIABLE, "").lower() in TRUE
            raise ListenerExit(VERSION_DEPRECATED if opted_in else TERMINATED)
        if response.status >= 300:
            self._poll_later(f"{response.status} {response.message}")
            return
        self._pause_s = FIRST_PAUSE_S
        kind = response.body.get("type")
        if kind == "job" and self._worker is None:
            self._start_job(response.body["job"])
        elif kind == "cancel" and self._worker is not None:
            self._worker.cancel()
        elif kind == "update" and self._worker is None:
            from .update import begin_update  # noqa: PLC0415 - start-up time counts in tests and the demo

            begin_update(self._home, self._home.work_folder(self._settings.work_folder), response.body["version"])
            # Runner.Listener/Runner.cs, RunAsync.
            raise ListenerExit(UPDATING_AFTER_ONE_JOB if self._settings.ephemeral else UPDATING)

    # The job

    def _start_job(self, job: dict[str, Any]) -> None:
        response = self._request_until_answered(
            "POST", self._path(f"/jobs/{job['id']}/acknowledge"), {}, limit_s=REPORT_LIMIT_S
        )
        if (
            response is not None
            and response.body.get("errorKind") == "AcknowledgeJobNotFound"
            and self._settings.ephemeral
        ):
            # Runner.Listener/Runner.cs, RunAsync, since 2.336.0 (commit 802fd9c0b). It says nothing on its output.
            self._home.diagnose("Runner", "Acknowledge returned job-not-found for ephemeral runner request. Exiting.")
            self._leave(OK)
        if response is None or response.status != 200:
            return  # the job was cancelled or assigned to another runner
        say_with_time(f"Running job: {job['name']}")
        message = {
            **job,
            "runner": self._settings.agent_name,
            "server": self._server,
            "work": str(self._home.work_folder(self._settings.work_folder)),
            # Random, because the worker kills every process that has this value in its environment.
            "tracking": os.urandom(16).hex(),
        }
        self._worker = WorkerProcess(self._home, message)
        self._renew_at = time.monotonic() + self._renew_s

    def _renew(self, worker: WorkerProcess) -> None:
        """Renew the lease and send the output so far. After a failure, the next renewal sends it again."""
        self._renew_at = time.monotonic() + self._renew_s
        output = worker.take_output()
        try:
            path = self._path(f"/jobs/{worker.job_id}/renew")
            response = Call(
                self._server, "POST", path, body={"output": output}, secret=self._secret, timeout_s=self._renew_s * 4
            ).response()
        except OSError:
            worker.prepend_output(output)
            return
        if response.status == 410:
            raise ListenerExit(TERMINATED)
        if response.status == 200 and response.body.get("cancel"):
            worker.cancel()

    def _finish_job(self, worker: WorkerProcess) -> None:
        self._worker = None
        # The worker may have ended by the same signal before its listener handled it.
        ended_by_signal = "failure" if self._stopping else worker.result
        conclusion = worker.cancelled_result if worker.cancelled else ended_by_signal
        body = {"conclusion": conclusion, "output": worker.take_output(), **worker.report}
        limit_s = SHUTDOWN_LIMIT_S if self._stopping else REPORT_LIMIT_S
        self._request_until_answered("POST", self._path(f"/jobs/{worker.job_id}/complete"), body, limit_s=limit_s)
        say_with_time(f"Job {worker.job_name} completed with result: {RESULTS[conclusion]}")
        self._poll_at = 0.0
        if self._settings.ephemeral:
            # The server has removed the registration, so there is no session to close.
            self._leave(OK, closes_session=False)

    def _leave(self, code: int, *, closes_session: bool = True) -> NoReturn:
        """Exit without the local configuration, which is of no use any more."""
        self._is_leaving = True
        if not closes_session:
            self._session = ""
        raise ListenerExit(code)

    def _request_until_answered(
        self, method: str, path: str, body: dict[str, Any] | None, *, limit_s: float, wait_s: float = 0.0
    ) -> HttpResponse | None:
        """Repeat the request until a response below 500. Return None at the time limit or after a signal."""
        ends_at, pause_s = time.monotonic() + limit_s, FIRST_PAUSE_S
        while True:
            try:
                timeout_s = max(limit_s, RESPONSE_LIMIT_S) + wait_s
                response = self._request(method, path, body, timeout_s=timeout_s, interruptible=wait_s > 0)
                if response.status < 500 and response.status != 429:
                    return response
            except OSError as problem:
                self._home.diagnose("Runner", f"{method} failed: {problem}")
            if time.monotonic() + pause_s >= ends_at or (self._stopping and limit_s > SHUTDOWN_LIMIT_S):
                return None
            self._sleep(pause_s)
            pause_s = min(LAST_PAUSE_S, pause_s * 2)

    def _request(
        self, method: str, path: str, body: dict[str, Any] | None, *, timeout_s: float, interruptible: bool
    ) -> HttpResponse:
        """Send one request. A signal interrupts it only if it is a long poll."""
        pending = Call(self._server, method, path, body=body, secret=self._secret, timeout_s=timeout_s)
        ends_at = time.monotonic() + timeout_s
        try:
            while (left := ends_at - time.monotonic()) > 0:
                sources: list[Any] = [pending, self._wake]
                ready, _, _ = select.select(sources, [], [], left)
                if self._wake in ready:
                    os.read(self._wake, 64)
                if self._stopping and interruptible:
                    raise InterruptedError("interrupted by a signal")
                response = pending.feed() if pending in ready else None
                if response is not None:
                    return response
        finally:
            pending.close()
        raise TimeoutError("no response in time")

    def _sleep(self, pause_s: float) -> None:
        ready, _, _ = select.select([self._wake], [], [], pause_s)
        if ready:
            os.read(self._wake, 64)

    def _path(self, rest: str) -> str:
        return f"/_runner/sessions/{self._session}{rest}"


def listen(home: RunnerHome) -> int:
    settings, secret = load_settings(home), load_secret(home)
    if settings is None or secret is None:
        say_error("An error occurred: Not configured. Run config.(sh/cmd) to configure the runner.")
        return TERMINATED
    if not settings.server_url_v2:
        # Runner.Listener/BrokerMessageListener.cs, CreateSessionAsync.
        raise InvalidConfiguration("ServerUrlV2 is not set")
    try:
        work = home.work_folder(settings.work_folder)
    except ValueError as problem:
        say_error(f"An error occurred: {problem}")
        return TERMINATED
    try:
        # Runner.Listener/Runner.cs, RunAsync.
        work.mkdir(parents=True, exist_ok=True)
        check_readable(work)
    except OSError:
        say_error(f"Fail to create and validate runner's work directory '{work}'.")
        return TERMINATED
    return FakeListener(home, settings, secret).run()
