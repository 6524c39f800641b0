"""Checks of the pool's functions: what the account lets them run at once, and what the role of the broker permits.

The broker launches with its own role, which a person's credentials say nothing about. So it checks itself, when it is
invoked directly with `BROKER_CHECK`; what it does then is `AwsDoctor.provision_checks`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from botocore.exceptions import ClientError

from remuda.adapters.aws.calls import code_of, translated
from remuda.adapters.aws.clients import AwsClients, config
from remuda.adapters.aws.ec2.template import template_name
from remuda.domain.errors import RemudaError, UserError
from remuda.ports.doctor import Check, CheckResult, CheckStatus, ok, problem, warning

LAMBDA = "Lambda"
#: The event with which the broker checks its role.
BROKER_CHECK = {"operation": "check"}
#: Seconds for its answer: a function that starts, and its checks.
CHECK_TIMEOUT_S = 40.0
#: Executions that Lambda keeps for functions without reserved ones ("Configuring reserved concurrency"; accounts with
#: a small quota have a smaller minimum, which is not documented). With fewer, a burst of workflows is throttled.
UNRESERVED_MINIMUM = 100
#: Executions that a waiting workflow needs: its provision, and the requests for its progress.
PER_WORKFLOW = 2
#: Quota of concurrent executions (Service Quotas, service lambda).
REQUEST_QUOTA = (
    "aws service-quotas request-service-quota-increase --service-code lambda --quota-code L-B99A9384 "
    "--desired-value 1000"
)
BROKER = "broker"
NO_BROKER = ok("not checked: the pool has no broker")
MAX_SHOWN = 400
_MISSING = "ResourceNotFoundException"


def broker_name(pool: str) -> str:
    return f"{template_name(pool)}-broker"


def judge_concurrency(settings: Mapping[str, Any], *, reserving: int = 0) -> CheckResult:
    """Judge the answer of GetAccountSettings. `reserving` are the executions that a deployment will reserve."""
    limit = settings["AccountLimit"]
    total, free = int(limit["ConcurrentExecutions"]), int(limit["UnreservedConcurrentExecutions"])
    shown = f"{total} concurrent executions, {free} of them not reserved"
    if reserving > 0 and free - reserving < UNRESERVED_MINIMUM:
        return problem(
            f"{shown}: Lambda keeps {UNRESERVED_MINIMUM} of them unreserved, so {reserving} cannot be reserved",
            f"run {REQUEST_QUOTA}, or deploy with --parameter ReserveConcurrency=false --parameter BrokerConcurrency=",
        )
    if free < UNRESERVED_MINIMUM:
        return warning(
            f"{shown}: {free // PER_WORKFLOW} workflows can wait for runners at once, and others are throttled",
            f"run {REQUEST_QUOTA}",
        )
    return ok(f"{shown}: {free // PER_WORKFLOW} workflows can wait for runners at once")


def judge_broker(name: str, content: bytes, *, has_failed: bool) -> CheckResult:
    """Judge the answer of the broker to `BROKER_CHECK`."""
    document = _parsed(content)
    if has_failed:
        message = str(document.get("errorMessage") or "it gives no reason")[:MAX_SHOWN]
        return problem(f"function {name} failed: {message}", "see its log group, or run remuda deploy")
    checks = document.get("checks")
    if not isinstance(checks, list) or not all(isinstance(item, dict) for item in checks):
        return warning(f"function {name} is of a version that does not check its role", "run remuda deploy")
    failed = [item for item in checks if item.get("status") != CheckStatus.OK]
    if failed:
        texts = [f"{item.get('name')}: {str(item.get('message'))[:MAX_SHOWN]}" for item in failed]
        return problem(
            f"the role of {name} cannot do what workflows need: {'; '.join(texts)}",
            "run remuda deploy, and look for a permissions boundary or a policy of the organization that denies it",
        )
    return ok(f"{name} may launch: {len(checks)} checks under its own role, with dry runs")


def _parsed(content: bytes) -> dict[str, Any]:
    try:
        document = json.loads(content)
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


class FunctionsDoctor:
    def __init__(self, *, clients: AwsClients, pool: str, needs: tuple[str, ...] = ()) -> None:
        self._clients = clients
        self._name = broker_name(pool)
        self._needs = needs
        self._lock = asyncio.Lock()
        self._judged: CheckResult | None = None

    def checks(self) -> Sequence[Check]:
        return (
            Check(name=BROKER, run=self.broker, needs=self._needs),
            Check(name="concurrency", run=self._concurrency, needs=self._needs),
        )

    async def broker(self) -> CheckResult:
        """Let the broker check what its role permits."""
        async with self._lock:
            if self._judged is None:
                self._judged = await self._ask()
        return self._judged

    async def _concurrency(self) -> CheckResult:
        # Also of a broker that does not answer, which may be throttled.
        with suppress(RemudaError):
            if await self.broker() == NO_BROKER:
                return NO_BROKER
        try:
            with translated(LAMBDA, "the account's settings"):
                return judge_concurrency(await (await self._client()).get_account_settings())
        except UserError as error:
            return warning(f"the account's limit is not known: {error.message}", "grant lambda:GetAccountSettings")

    async def _ask(self) -> CheckResult:
        client = await self._client()
        try:
            with translated(LAMBDA, self._name):
                try:
                    answer = await client.invoke(FunctionName=self._name, Payload=json.dumps(BROKER_CHECK).encode())
                except ClientError as error:
                    if code_of(error) == _MISSING:
                        return NO_BROKER
                    raise
                content = await answer["Payload"].read()
        except UserError as error:
            return warning(f"its role was not checked: {error.message}", f"grant lambda:InvokeFunction on {self._name}")
        return judge_broker(self._name, content, has_failed=bool(answer.get("FunctionError")))

    async def _client(self) -> Any:
        return await self._clients.client("lambda", LAMBDA, config(read_timeout_s=CHECK_TIMEOUT_S))
