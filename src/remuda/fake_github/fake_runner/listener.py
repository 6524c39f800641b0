"""`bin/Runner.Listener run`: keep a session, take jobs, let a worker process run them, tell the outcome."""

import os
import select
import signal
import time
from typing import Any

from . import VERSION
from .home import CREDENTIALS_FILE, RUNNER_FILE, Home, say, say_at, version_line
from .protocol import Answer, Call, call
from .worker_process import WorkerProcess

OK, TERMINATED, RETRY, SESSION_CONFLICT = 0, 1, 2, 5

POLL_S = 50
#: How long an existing session may take to end; the real runner waits for 4 minutes.
CONFLICT_WAIT_S = 8.0
CONFLICT_WAIT_VARIABLE = "FAKE_RUNNER_SESSION_CONFLICT_S"
FIRST_PAUSE_S, LAST_PAUSE_S = 0.05, 2.0
CONNECT_LIMIT_S = 60.0
REPORT_LIMIT_S = 60.0
#: After a signal the end has to come soon: a server that is not there is not tried for longer.
FAREWELL_LIMIT_S = 3.0
#: A server that listens is given longer to answer: what it was told last would else be lost.
ANSWER_LIMIT_S = 15.0

RESULTS = {"success": "Succeeded", "failure": "Failed", "cancelled": "Canceled"}
REGISTRATION_DELETED = (
    "Failed to create a session. The runner registration has been deleted from the server, please re-configure. "
    "Runner registrations are automatically deleted for runners that have not connected to the service recently."
)


class Ended(Exception):
    """The listener has to end with this code."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class Listener:
    def __init__(self, home: Home, settings: dict[str, Any], credentials: dict[str, Any]) -> None:
        self._home = home
        self._settings = settings
        self._server: str = settings["serverUrl"]
        self._secret: str = credentials["data"]["token"]
        self._session = ""
        self._renew_s = 1.0
        self._poll: Call | None = None
        self._pause_s = FIRST_PAUSE_S
        self._poll_at = 0.0
        self._worker: WorkerProcess | None = None
        self._renew_at = 0.0
        self._stopping = False
        self._wake, wake_end = os.pipe()
        for end in (self._wake, wake_end):
            os.set_blocking(end, False)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._stop)
        signal.set_wakeup_fd(wake_end, warn_on_full_buffer=False)

    def run(self) -> int:
        try:
            self._open_session()
            say(f"\n√ Connected to GitHub\n\n{version_line()}")
            say_at("Listening for Jobs")
            while not (self._stopping and self._worker is None):
                self._turn()
        except Ended as ended:
            return ended.code
        finally:
            self._farewell()
        say("Exiting...")
        return OK

    def _stop(self, *_: object) -> None:
        self._stopping = True

    # The session

    def _open_session(self) -> None:
        wait_s = float(os.environ.get(CONFLICT_WAIT_VARIABLE) or CONFLICT_WAIT_S)
        path = f"/_runner/sessions?wait={wait_s}"
        answer = self._persist("POST", path, {"version": VERSION}, limit_s=CONNECT_LIMIT_S, wait_s=wait_s)
        if answer is None:
            raise Ended(OK if self._stopping else RETRY)
        if answer.status == 410:
            say(REGISTRATION_DELETED)
            raise Ended(TERMINATED)
        if answer.status == 409:
            say(f"A session for this runner already exists.\n{answer.message}")
            raise Ended(SESSION_CONFLICT)
        if answer.status != 201:
            say(f"Failed to create a session. {answer.message}")
            raise Ended(RETRY)
        self._session = answer.body["session"]
        self._renew_s = float(answer.body["renew_s"])

    def _farewell(self) -> None:
        if self._poll is not None:
            self._poll.close()
        if self._worker is not None:
            self._worker.end()
        if self._session:
            self._persist("DELETE", self._path(""), None, limit_s=FAREWELL_LIMIT_S)

    # One turn of the loop: wait for a message, the worker, a signal or a timer

    def _turn(self) -> None:
        if self._stopping and self._worker is not None:
            self._worker.cancel()
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
        """A job that is being cancelled has no more to be told."""
        return not self._stopping and not (self._worker is not None and self._worker.cancelled)

    def _begin_poll(self) -> None:
        if self._poll is not None or not self._may_poll() or time.monotonic() < self._poll_at:
            return
        try:
            self._poll = Call(
                self._server,
                "GET",
                self._path(f"/message?wait={POLL_S}"),
                secret=self._secret,
                timeout_s=POLL_S + 30,
            )
        except OSError as problem:
            self._poll_later(str(problem))

    def _read_poll(self) -> None:
        assert self._poll is not None  # noqa: S101  # the caller looked
        try:
            answer = self._poll.feed()
        except OSError as problem:
            self._poll.close()
            self._poll = None
            self._poll_later(str(problem))
            return
        if answer is not None:
            self._poll = None
            self._take_message(answer)

    def _poll_later(self, reason: str) -> None:
        self._home.diagnose("Runner", f"No message: {reason}. Next try in {self._pause_s} s")
        self._poll_at = time.monotonic() + self._pause_s
        self._pause_s = min(LAST_PAUSE_S, self._pause_s * 2)

    def _take_message(self, answer: Answer) -> None:
        if answer.status == 410:
            say(REGISTRATION_DELETED)
            raise Ended(TERMINATED)
        if answer.status == 404:
            say_at("The session is gone. Creating a new one.")
            self._session = ""
            self._open_session()
            return
        if answer.status >= 300:
            self._poll_later(f"{answer.status} {answer.message}")
            return
        self._pause_s = FIRST_PAUSE_S
        kind = answer.body.get("type")
        if kind == "job" and self._worker is None:
            self._start_job(answer.body["job"])
        elif kind == "cancel" and self._worker is not None:
            self._worker.cancel()

    # The job

    def _start_job(self, job: dict[str, Any]) -> None:
        answer = self._persist("POST", self._path(f"/jobs/{job['id']}/acknowledge"), {}, limit_s=REPORT_LIMIT_S)
        if answer is None or answer.status != 200:
            return  # it was cancelled or given to another runner meanwhile
        say_at(f"Running job: {job['name']}")
        message = {
            **job,
            "runner": self._settings["agentName"],
            "server": self._server,
            "work": self._settings["workFolder"],
            # Unique beyond this server: the worker ends every process that carries it, whoever started it.
            "tracking": os.urandom(16).hex(),
        }
        self._worker = WorkerProcess(self._home.root, message)
        self._renew_at = time.monotonic() + self._renew_s

    def _renew(self, worker: WorkerProcess) -> None:
        """Keep the lease, and hand in the output so far. A failure is made good by the next time."""
        self._renew_at = time.monotonic() + self._renew_s
        output = worker.take_output()
        try:
            path = self._path(f"/jobs/{worker.job_id}/renew")
            answer = call(
                self._server, "POST", path, body={"output": output}, secret=self._secret, timeout_s=self._renew_s * 4
            )
        except OSError:
            worker.give_back(output)
            return
        if answer.status == 410:
            raise Ended(TERMINATED)
        if answer.status == 200 and answer.body.get("cancel"):
            worker.cancel()

    def _finish_job(self, worker: WorkerProcess) -> None:
        self._worker = None
        conclusion = "cancelled" if self._stopping or worker.cancelled else worker.result
        body = {"conclusion": conclusion, "output": worker.take_output(), "steps": worker.steps}
        limit_s = FAREWELL_LIMIT_S if self._stopping else REPORT_LIMIT_S
        self._persist("POST", self._path(f"/jobs/{worker.job_id}/complete"), body, limit_s=limit_s)
        say_at(f"Job {worker.job_name} completed with result: {RESULTS[conclusion]}")
        self._poll_at = 0.0
        if self._settings.get("ephemeral"):
            # The server has removed the registration: nothing is left to say goodbye to.
            self._session = ""
            self._home.forget()
            raise Ended(OK)

    def _persist(
        self, method: str, path: str, body: dict[str, Any] | None, *, limit_s: float, wait_s: float = 0.0
    ) -> Answer | None:
        """Repeat until there is an answer that counts; None when the limit is over or a signal came."""
        ends_at, pause_s = time.monotonic() + limit_s, FIRST_PAUSE_S
        while True:
            try:
                timeout_s = max(limit_s, ANSWER_LIMIT_S) + wait_s
                answer = self._ask(method, path, body, timeout_s=timeout_s, patient=wait_s == 0)
                if answer.status < 500 and answer.status != 429:
                    return answer
            except OSError as problem:
                self._home.diagnose("Runner", f"{method} failed: {problem}")
            waiting_is_over = time.monotonic() + pause_s >= ends_at
            if waiting_is_over or (self._stopping and limit_s > FAREWELL_LIMIT_S):
                return None
            self._nap(pause_s)
            pause_s = min(LAST_PAUSE_S, pause_s * 2)

    def _ask(self, method: str, path: str, body: dict[str, Any] | None, *, timeout_s: float, patient: bool) -> Answer:
        """One request. A signal ends the wait for it only if it is one that may take long anyway."""
        under_way = Call(self._server, method, path, body=body, secret=self._secret, timeout_s=timeout_s)
        ends_at = time.monotonic() + timeout_s
        try:
            while (left := ends_at - time.monotonic()) > 0:
                sources: list[Any] = [under_way, self._wake]
                ready, _, _ = select.select(sources, [], [], left)
                if self._wake in ready:
                    os.read(self._wake, 64)
                if self._stopping and not patient:
                    raise InterruptedError("a signal came")
                answer = under_way.feed() if under_way in ready else None
                if answer is not None:
                    return answer
        finally:
            under_way.close()
        raise TimeoutError("no answer in time")

    def _nap(self, pause_s: float) -> None:
        ready, _, _ = select.select([self._wake], [], [], pause_s)
        if ready:
            os.read(self._wake, 64)

    def _path(self, rest: str) -> str:
        return f"/_runner/sessions/{self._session}{rest}"


def listen(home: Home) -> int:
    settings, credentials = home.load(RUNNER_FILE), home.load(CREDENTIALS_FILE)
    if settings is None or credentials is None:
        say("An error occurred: Not configured. Run config.(sh/cmd) to configure the runner.")
        return TERMINATED
    return Listener(home, settings, credentials).run()
