"""Lambda handler of the broker: provisions and releases runners for workflows, which need no right but to invoke it.

A request carries the OIDC token that GitHub issued to the workflow's job. Run, attempt, repository and event come from
its signed claims; the request's own values are only compared with them. Everything else is limited by the settings of
the function and by the pool's stored configuration. The answer is what the action's step writes: log, outputs, summary
and exit code. Refusals and failures are answers, too; none contains a token.

A direct invocation with `BROKER_CHECK` instead of a request needs no token: the broker then tries what its role
permits, with dry runs and writes under conditions that are not met. Nobody gains by it: it changes nothing, and it
answers with names of calls and with the reasons of AWS. It cannot be sent to the function's URL.

One process serves many requests, one at a time: it keeps its connections, its settings and the issuer's keys.
"""

from __future__ import annotations

import asyncio
import base64
import difflib
import io
import json
import logging
import os
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

# Imported for the first request already here, while Lambda initializes the process with a full CPU.
import remuda.adapters.aws.dynamodb.store
import remuda.adapters.aws.ec2.compute
import remuda.adapters.aws.sqs  # noqa: F401
from remuda.action.output import StepLog
from remuda.action.step import SETTING_INPUTS, STEP_INPUTS, ActionInputs, StepOutput, finish
from remuda.adapters.aws.clients import AwsClients
from remuda.adapters.aws.functions import BROKER_CHECK
from remuda.adapters.github.oidc import Fetch, IssuerKeys, TokenVerifier, fetch_url
from remuda.adapters.system.clock import SystemClock
from remuda.aws_lambda.runtime import (
    RESERVE_S,
    InvocationMetrics,
    LambdaContext,
    LambdaEventLog,
    LambdaOutcome,
    read_environment,
    run_with_timeout,
    write_line,
)
from remuda.cli.lifecycle import LABEL_SEPARATORS, show_provision, show_release
from remuda.cli.run import EXIT_INTERRUPTED, EXIT_OK, bug_error
from remuda.config.settings import Settings
from remuda.config.sources import load
from remuda.controlplane.context import Context
from remuda.controlplane.provision import ProvisionRequest, ProvisionResult, provision
from remuda.controlplane.read.progress import ProvisionProgress, provisioned_instances, read_progress
from remuda.controlplane.release import release
from remuda.domain.errors import (
    CapacityError,
    Interrupted,
    InvariantViolated,
    RemudaError,
    TimedOut,
    Unavailable,
    UserError,
)
from remuda.domain.provision import ProvisionStatus
from remuda.domain.text import quote
from remuda.domain.trust import Trust, claimed_trust
from remuda.domain.workflow_identity import (
    NotAllowed,
    TokenRejected,
    WorkflowIdentity,
    authorize,
    check_run,
    parse_identity,
)
from remuda.ports.calls import CallCounter
from remuda.ports.clock import Clock
from remuda.ports.doctor import CheckResult, CheckStatus, problem
from remuda.ports.event_log import EventLog
from remuda.wiring import open_context

OPERATIONS = ("provision", "release", "state", "cancel")
#: Inputs that a workflow may pass. The pool's stack sets everything else.
WORKFLOW_INPUTS = frozenset(
    {
        "add",
        "allowed-instance-types",
        "ephemeral",
        "instance-count",
        "max-runtime-min",
        "provision-timeout-sec",
        "resource-class",
        "run-id",
        "tier",
        "usage-class",
    }
)
#: Inputs of direct mode that the token replaces.
CLAIMED_INPUTS = frozenset({"repository", "run-attempt"})
#: Seconds that a provision leaves of the function's time, for its rollback and for the answer.
PROVISION_RESERVE_S = 30.0
#: Seconds that a cancelled step waits for its instances: GitHub kills it after ten.
CANCEL_WAIT_S = 3.0
#: Seconds between two searches for the provision that it cancels.
CANCEL_POLL_S = 0.25
#: Seconds that settings are used before they are read again.
SETTINGS_LIFETIME_S = 60.0
#: Seconds for the checks of the role.
CHECK_LIMIT_S = 30.0
MAX_BODY = 65_536
MAX_SHOWN = 60
_INPUT_NAME = re.compile(r"[a-z-]{1,40}")


# Requests -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class BrokerRequest:
    operation: str
    token: str = field(repr=False)
    run_id: str
    run_attempt: str
    inputs: Mapping[str, str] = field(default_factory=dict)


def is_http(event: Any) -> bool:
    """Whether the event is a request to the function's URL (payload format 2.0)."""
    context = event.get("requestContext") if isinstance(event, dict) else None
    return isinstance(context, dict) and isinstance(context.get("http"), dict)


def parse_request(event: Any) -> BrokerRequest:
    document = _body(event) if is_http(event) else event
    if not isinstance(document, dict):
        raise UserError("the request is not a JSON object", field="body", fix='send {"operation": "provision", …}')
    operation, token, run_id, run_attempt = (
        _text(document, name) for name in ("operation", "token", "run-id", "run-attempt")
    )
    if operation not in OPERATIONS:
        raise UserError(
            f"operation is {quote(operation, MAX_SHOWN)}", field="operation", fix=f"use {', '.join(OPERATIONS)}"
        )
    if not token:
        raise TokenRejected(
            "the request has no OIDC token",
            field="token",
            fix="give the job 'permissions: id-token: write'; pull requests from forks get no token, use a runner set",
        )
    return BrokerRequest(
        operation=operation, token=token, run_id=run_id, run_attempt=run_attempt, inputs=_inputs(document)
    )


def _body(event: Mapping[str, Any]) -> Any:
    method = event["requestContext"]["http"].get("method")
    body = event.get("body")
    if method != "POST" or not isinstance(body, str) or len(body) > MAX_BODY:
        raise UserError(f"the request is no POST with a body of up to {MAX_BODY} bytes", field="body", fix="send JSON")
    try:
        return json.loads(base64.b64decode(body, validate=True) if event.get("isBase64Encoded") else body)
    except (ValueError, RecursionError):
        raise UserError("the body of the request is not JSON", field="body", fix="send JSON") from None


def _text(document: Mapping[str, Any], name: str) -> str:
    value = document.get(name, "")
    if not isinstance(value, str):
        # The token is never shown.
        raise UserError(f"{name} is a {type(value).__name__}", field=name, fix="send a text")
    return value


def _inputs(document: Mapping[str, Any]) -> dict[str, str]:
    """The inputs that are set. All of them are texts; an empty one is not set."""
    given = document.get("inputs") or {}
    if not isinstance(given, dict):
        raise UserError(f"inputs is a {type(given).__name__}", field="inputs", fix="send an object of texts")
    found: dict[str, str] = {}
    for name, value in given.items():
        if isinstance(value, str) and not value.strip():
            continue
        if name not in WORKFLOW_INPUTS:
            raise _refused_input(name)
        if not isinstance(value, str):
            raise UserError(f"{name} is a {type(value).__name__}", field=name, fix="send a text")
        found[name] = value.strip()
    return found


def _refused_input(name: str) -> UserError:
    if name in CLAIMED_INPUTS:
        return UserError(f"{name} comes from the workflow's OIDC token", field=name, fix="remove it from the step")
    if name in SETTING_INPUTS | STEP_INPUTS:
        return UserError(
            f"{name} is set by the pool, not by a workflow",
            field=name,
            fix="remove it from the step, or use direct mode",
        )
    # Any other text could be a misplaced token.
    if not _INPUT_NAME.fullmatch(name):
        return UserError(
            "an input has an invalid name", field="inputs", fix=f"use {', '.join(sorted(WORKFLOW_INPUTS))}"
        )
    near = difflib.get_close_matches(name, WORKFLOW_INPUTS, n=1)
    fix = f"did you mean {near[0]}?" if near else f"use {', '.join(sorted(WORKFLOW_INPUTS))}"
    return UserError(f"there is no input {name!r}", field=name, fix=fix)


# Answers ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class BrokerAnswer:
    """The answer. The step reads it without a JSON parser: one flat object of texts without special characters."""

    exit_code: int
    log: str
    outputs: str = ""
    summary: str = ""
    is_done: bool = True
    #: Whether there is a provision; after a lost connection, the step does not wait for one that never began.
    is_begun: bool = True
    #: Status of the answer to a request to the function's URL.
    http_status: int = 200

    def document(self) -> dict[str, str]:
        return {
            "exit": str(self.exit_code),
            "done": "true" if self.is_done else "false" if self.is_begun else "none",
            "log": _encoded(self.log),
            "outputs": _encoded(self.outputs),
            "summary": _encoded(self.summary),
        }

    def http_document(self) -> dict[str, Any]:
        return {
            "statusCode": self.http_status,
            "headers": {"content-type": "application/json", "cache-control": "no-store"},
            "body": json.dumps(self.document()),
        }


def _encoded(text: str) -> str:
    return base64.b64encode(text.encode("utf-8", "backslashreplace")).decode("ascii")


class BrokerOutput(StepOutput):
    """The output of the action's step, in memory. Its events also go to the function's log."""

    def __init__(self, event_log: EventLog) -> None:
        self.stream = io.StringIO()
        super().__init__(StepLog(self.stream, tells_runner=False))
        self._function_log = event_log

    def event_log(self, clock: Clock) -> EventLog:
        return BothEventLogs(self._function_log, super().event_log(clock))

    def answer_of(self, mode: str, code: int, *, http_status: int = 200) -> BrokerAnswer:
        files = finish(mode, self, code)
        return BrokerAnswer(
            exit_code=code,
            log=self.stream.getvalue(),
            outputs=files.outputs,
            summary=files.summary,
            http_status=http_status,
        )


class BothEventLogs:
    def __init__(self, *logs: EventLog) -> None:
        self._logs = logs

    def record(self, action: str, why: str = "", **facts: Any) -> None:
        for log in self._logs:
            log.record(action, why, **facts)


class CurrentEventLog:
    """The event log of the current request, for adapters that outlive it."""

    def __init__(self) -> None:
        self.current: EventLog | None = None

    def record(self, action: str, why: str = "", **facts: Any) -> None:
        if self.current is not None:
            self.current.record(action, why, **facts)


# Work ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class AuthorizedRequest:
    """An authorized request: the job that sent it, and the settings that apply to it."""

    request: BrokerRequest
    identity: WorkflowIdentity
    settings: Settings
    trust: Trust
    #: Label of the run's runners: its number, optionally with a suffix.
    label: str

    def provision_request(self, *, max_timeout_s: float) -> ProvisionRequest:
        settings, inputs = self.settings, self.request.inputs
        return ProvisionRequest(
            run_id=self.label,
            attempt=self.identity.run_attempt,
            count=settings.instance_count,
            resource_class=settings.resource_class,
            usage_class=settings.usage_class,
            patterns=settings.allowed_instance_types,
            scope=settings.github_scope,
            tier=self.trust.tier,
            tier_reason=self.trust.why,
            repository=self.identity.repository,
            ephemeral=settings.ephemeral,
            add=settings.add,
            # Only those of the workflow: without them, the stored values of the pool apply.
            max_runtime_s=settings.max_runtime_min * 60 if "max-runtime-min" in inputs else None,
            timeout_s=settings.provision_timeout_sec if "provision-timeout-sec" in inputs else None,
            is_runtime_limited=True,
            max_timeout_s=max_timeout_s,
        )


def authorize_request(request: BrokerRequest, identity: WorkflowIdentity, settings: Settings) -> AuthorizedRequest:
    """The request with verified claims. Raises `TokenRejected`, `NotAllowed` or `UserError`."""
    check_run(identity, run_id=request.run_id, run_attempt=request.run_attempt)
    if not settings.given("github_scope"):
        raise UserError(
            "the broker has no github-scope", field="github-scope", fix="set GithubScope of the pool's stack"
        )
    authorize(
        identity,
        pool=settings.pool,
        scope=settings.github_scope,
        repositories=settings.repositories,
        environments=settings.environments,
    )
    label = request.inputs.get("run-id", identity.run_id)
    if label != identity.run_id and not label.startswith(
        tuple(f"{identity.run_id}{each}" for each in LABEL_SEPARATORS)
    ):
        raise NotAllowed(
            f"run-id is {quote(label, MAX_SHOWN)}, but the token is of run {identity.run_id}",
            field="run-id",
            fix="omit it, or give github.run_id with a suffix: 123-large",
        )
    requested = settings.tier if "tier" in request.inputs else None
    trust = claimed_trust(identity.event, requested, trusts_pull_requests=settings.trust_pull_requests)
    return AuthorizedRequest(request=request, identity=identity, settings=settings, trust=trust, label=label)


async def run_request(
    authorized: AuthorizedRequest, context: Context, output: BrokerOutput, *, limit_s: float
) -> BrokerAnswer:
    """Do what the request asks for. `limit_s` are the seconds that are left."""
    context = output.guarded(replace(context, event_log=output.event_log(context.clock)))
    operation = authorized.request.operation
    if operation == "state":
        return await _state(authorized, context, output)
    if operation == "cancel":
        return await _cancel(authorized, context, output)
    with output.channel.grouped(f"remuda {operation}"):
        if operation == "provision":
            request = authorized.provision_request(max_timeout_s=max(1.0, limit_s - PROVISION_RESERVE_S))
            provisioned = await provision(context, request)
        else:
            released = await release(context, run_id=authorized.label, attempt=authorized.identity.run_attempt)
    if operation == "provision":
        return output.answer_of(operation, show_provision(output, provisioned))
    unused = ActionInputs(given={"mode": operation, **authorized.request.inputs}).unused()
    if unused:
        output.warnings.append(f"mode release does not use {', '.join(unused)}: remove it")
    return output.answer_of(operation, show_release(output, released))


async def _cancel(authorized: AuthorizedRequest, context: Context, output: BrokerOutput) -> BrokerAnswer:
    """Release the run without waiting for its machines: the provision in progress gives them back itself."""
    result = "no provision has started yet; release gives back the instances of one that starts later"
    with output.channel.grouped("remuda release"):
        try:
            async with asyncio.timeout(CANCEL_WAIT_S) as limit:
                await _wait_for_start(authorized, context)
                result = "the provision was stopped, and its instances are being given back"
                await release(context, run_id=authorized.label, attempt=authorized.identity.run_attempt)
                result = "the provision was stopped, and its instances were given back"
        except TimeoutError:
            if not limit.expired():
                raise
    output.error(Interrupted(f"cancelled; {result}"))
    return output.answer_of("provision", EXIT_INTERRUPTED)


async def _wait_for_start(authorized: AuthorizedRequest, context: Context) -> None:
    """Wait for the record of the provision: until its function has started and written it, nothing can be stopped."""
    ended = ""
    while True:
        found = (await _progress(authorized, context)).provision
        if found is not None and found.status in {ProvisionStatus.OPEN, ProvisionStatus.COMMITTED}:
            return
        # Another provision of the attempt may have ended before this one.
        if found is not None and found.provision_id != (ended := ended or found.provision_id):
            return
        await context.clock.sleep(CANCEL_POLL_S)


async def _progress(authorized: AuthorizedRequest, context: Context) -> ProvisionProgress:
    return await read_progress(
        context,
        run_id=authorized.label,
        attempt=authorized.identity.run_attempt,
        resource_class=authorized.settings.resource_class,
    )


async def _state(authorized: AuthorizedRequest, context: Context, output: BrokerOutput) -> BrokerAnswer:
    """The progress of the provision or, once it is done, the answer that the provision itself gives."""
    progress = await _progress(authorized, context)
    if not progress.is_done:
        output.channel.say(progress.text)
        is_begun = progress.provision is not None
        return BrokerAnswer(exit_code=EXIT_OK, log=output.stream.getvalue(), is_done=False, is_begun=is_begun)
    result = await _result(authorized, context, progress)
    if result is not None:
        return output.answer_of("provision", show_provision(output, result))
    record = progress.provision
    outcome = record.outcome if record is not None else None
    message = outcome.error if outcome is not None and outcome.error else progress.text
    output.error(Unavailable(message, fix=f"'remuda explain {authorized.label}' shows what happened"))
    return output.answer_of("provision", (outcome.exit_code if outcome else 0) or Unavailable.exit_code)


async def _result(
    authorized: AuthorizedRequest, context: Context, progress: ProvisionProgress
) -> ProvisionResult | None:
    record = progress.provision
    if record is None or record.status is not ProvisionStatus.COMMITTED or record.outcome is None:
        return None
    return ProvisionResult(
        run_id=record.run_id,
        provision_id=record.provision_id,
        label=record.run_id,
        instances=await provisioned_instances(context, record),
        tier=authorized.trust.tier,
        tier_reason=authorized.trust.why,
        ephemeral=authorized.settings.ephemeral,
        seconds=record.outcome.seconds,
        phases=record.outcome.phases,
        calls={},
        rejected=record.outcome.rejected,
    )


# Invocations --------------------------------------------------------------------------------------------------------


class BrokerFunction:
    """The broker in one process of Lambda: what it keeps between requests, and how it answers one."""

    def __init__(self, environ: Mapping[str, str], *, clock: Clock, fetch: Fetch = fetch_url) -> None:
        self._environ = environ
        self._clock = clock
        self._fetch = fetch
        self._event_log = CurrentEventLog()
        self._calls = CallCounter()
        self._kept = AsyncExitStack()
        self._context: Context | None = None
        self._clients: AwsClients | None = None
        self._variables: Mapping[str, str] | None = None
        self._variables_at = 0.0
        self._verifier: tuple[str, str, TokenVerifier] | None = None

    async def respond(self, event: Any, invocation: LambdaContext) -> dict[str, Any]:
        event_log = LambdaEventLog(self._clock, invocation.aws_request_id)
        metrics = InvocationMetrics(self._clock, event_log)
        self._calls.reset()
        metrics.calls = self._calls
        self._event_log.current = event_log
        output = BrokerOutput(event_log)
        try:
            if event == BROKER_CHECK:
                return await self._check(invocation, event_log, metrics)
            answer = await self._answer(event, invocation, output, event_log, metrics)
        finally:
            self._event_log.current = None
            write_line(metrics.line())
        return answer.http_document() if is_http(event) else answer.document()

    async def _answer(
        self,
        event: Any,
        invocation: LambdaContext,
        output: BrokerOutput,
        event_log: LambdaEventLog,
        metrics: InvocationMetrics,
    ) -> BrokerAnswer:
        # Twice through the loop: connections that the other side closed while the process was frozen are removed.
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        operation, is_working = "", False
        try:
            request = parse_request(event)
            operation = metrics.command = request.operation
            output.channel.mask(request.token)
            settings = await self._settings()
            metrics.pool = settings.pool
            claims = await self._verifier_for(settings).verify(request.token)
            authorized = authorize_request(request, parse_identity(claims), await self._settings(request.inputs))
            identity = authorized.identity
            event_log.record(
                "request",
                operation,
                run_id=authorized.label,
                attempt=identity.run_attempt,
                repository=identity.repository,
                github_event=identity.event,
                token_id=identity.token_id,
            )
            is_working = True
            limit_s = invocation.get_remaining_time_in_millis() / 1000 - RESERVE_S
            work = self._work(authorized, output, limit_s)
            answer = await run_with_timeout(limit_s, operation, work, fix="raise the function's timeout")
        except RemudaError as error:
            failure = error
        except Exception as error:  # noqa: BLE001 - a bug, answered in one line
            failure = bug_error(error)
            await self.close()
        else:
            metrics.outcome = LambdaOutcome(document={}, counts=_counts(output))
            event_log.record(f"{operation}-done", "", exit=answer.exit_code)
            return answer
        metrics.outcome = _failed_outcome(failure)
        message = output.channel.redact(f"{failure.message}; {failure.fix}".rstrip("; "))
        event_log.record(
            "refused" if isinstance(failure, UserError) else "failed", message, kind=type(failure).__name__
        )
        output.error(failure)
        mode = {"cancel": "provision", "state": "provision"}.get(operation, operation)
        return output.answer_of(mode, failure.exit_code, http_status=200 if is_working else _http_status(failure))

    async def _check(
        self, invocation: LambdaContext, event_log: LambdaEventLog, metrics: InvocationMetrics
    ) -> dict[str, Any]:
        """Try what the role permits. The document has the checks in the form of `remuda doctor --json`."""
        from remuda.cli.read import check_document  # noqa: PLC0415 - no request of a workflow needs it

        metrics.command = BROKER_CHECK["operation"]
        limit_s = min(CHECK_LIMIT_S, invocation.get_remaining_time_in_millis() / 1000 - RESERVE_S)
        try:
            results = await run_with_timeout(limit_s, metrics.command, self._try_role(metrics), fix="try again")
        except RemudaError as error:
            results = {"settings": problem(error.message, error.fix)}
        except Exception as error:  # noqa: BLE001 - a bug, answered in one line
            results = {"settings": problem(bug_error(error).message, "")}
            await self.close()
        metrics.outcome = LambdaOutcome(document={})
        denied = [name for name, result in results.items() if result.status is not CheckStatus.OK]
        event_log.record("check-done", ", ".join(denied))
        return {"checks": [check_document(name, result) for name, result in results.items()]}

    async def _try_role(self, metrics: InvocationMetrics) -> Mapping[str, CheckResult]:
        from remuda.controlplane.doctor import run_checks  # noqa: PLC0415 - see above
        from remuda.wiring.doctor import provision_checks  # noqa: PLC0415 - see above

        settings = await self._settings()
        metrics.pool = settings.pool
        clients = await self._aws_clients()
        async with self._opened(settings, needs_github=False) as context:
            try:
                stored = await context.store.get_config()
            except RemudaError:
                # The first check, of reads, shows why.
                return await run_checks(provision_checks(settings, context, clients, None)[:1])
            if stored is None:
                return {"configuration": problem("the pool has no configuration", "run remuda refresh")}
            return await run_checks(provision_checks(settings, context, clients, stored))

    async def _work(self, authorized: AuthorizedRequest, output: BrokerOutput, limit_s: float) -> BrokerAnswer:
        # A state is only read.
        needs_github = authorized.settings.ephemeral and authorized.request.operation != "state"
        async with self._opened(authorized.settings, needs_github=needs_github) as context:
            return await run_request(authorized, context, output, limit_s=limit_s)

    @asynccontextmanager
    async def _opened(self, settings: Settings, *, needs_github: bool) -> AsyncIterator[Context]:
        """The ports for a request. Only ephemeral runners need the GitHub credential, which is not kept."""
        if needs_github:
            async with open_context(settings, self._event_log, needs_github=True, calls=self._calls) as context:
                yield context
            return
        if self._context is None:
            opening = open_context(settings, self._event_log, needs_github=False, calls=self._calls)
            self._context = await self._kept.enter_async_context(opening)
        try:
            yield self._context
        finally:
            # Writes what is pending: the process may be frozen after the answer. The store can be used further.
            await self._context.store.close()

    async def _settings(self, inputs: Mapping[str, str] | None = None) -> Settings:
        """The settings of the function, with the inputs of a workflow."""
        now = self._clock.now().timestamp()
        if self._variables is None or abs(now - self._variables_at) >= SETTINGS_LIFETIME_S:
            variables = await read_environment(self._environ, await self._aws_clients())
            if self._variables is not None and variables != self._variables:
                await self.close()
            self._variables, self._variables_at = variables, now
        flags = {name.replace("-", "_"): value for name, value in (inputs or {}).items()}
        return load({**flags, "backend": "aws"}, environ=self._variables)

    async def _aws_clients(self) -> AwsClients:
        if self._clients is None:
            self._clients = await self._kept.enter_async_context(AwsClients())
        return self._clients

    def _verifier_for(self, settings: Settings) -> TokenVerifier:
        issuer, audience = settings.oidc_issuer, f"remuda-{settings.pool}"
        if self._verifier is None or self._verifier[:2] != (issuer, audience):
            keys = IssuerKeys(issuer=issuer, clock=self._clock, fetch=self._fetch)
            verifier = TokenVerifier(issuer=issuer, audience=audience, clock=self._clock, keys=keys)
            self._verifier = (issuer, audience, verifier)
        return self._verifier[2]

    async def close(self) -> None:
        """Close the connections. The next request opens new ones."""
        self._context = self._clients = None
        kept, self._kept = self._kept, AsyncExitStack()
        await kept.aclose()


def _counts(output: BrokerOutput) -> dict[str, int]:
    document = output.document
    if "reused" not in document:
        return {}
    return {"RunnersReused": int(document["reused"]), "RunnersCreated": int(document["created"])}


def _failed_outcome(failure: RemudaError) -> LambdaOutcome | None:
    """None if the broker itself failed; refusals and missing capacity have their own metrics."""
    if isinstance(failure, CapacityError):
        return LambdaOutcome(document={}, counts={"NoCapacity": 1})
    if not isinstance(failure, UserError):
        return None
    kind = {TokenRejected: "Token", NotAllowed: "Permission"}.get(type(failure), "Input")
    return LambdaOutcome(document={}, counts={"Refused": 1, f"Refused{kind}": 1})


def _http_status(failure: RemudaError) -> int:
    statuses: tuple[tuple[type[RemudaError], int], ...] = (
        (TokenRejected, 401),
        (NotAllowed, 403),
        (UserError, 400),
        (TimedOut, 504),
        (InvariantViolated, 500),
    )
    return next((status for kind, status in statuses if isinstance(failure, kind)), 503)


class _WarmProcess:
    """Objects that Lambda keeps in memory: one function, and one event loop, because connections belong to a loop."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner()
        self.function = BrokerFunction(os.environ, clock=SystemClock())


@cache
def _warm_process() -> _WarmProcess:
    return _WarmProcess()


def handler(event: Any, context: LambdaContext) -> dict[str, Any]:
    """Entry point, configured as `remuda.aws_lambda.broker.handler`."""
    # At DEBUG, libraries log requests and responses with their tokens and credentials.
    logging.disable(logging.DEBUG)
    process = _warm_process()
    return process.runner.run(process.function.respond(event, context))
