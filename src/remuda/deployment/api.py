"""Calls of AWS services by `deploy` and `destroy`, with errors for the person who runs them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass
from typing import Any

from botocore import xform_name
from botocore.exceptions import ClientError, ParamValidationError

from remuda.adapters.aws.calls import (
    FAILURES,
    ErrorCategory,
    await_response,
    category_of,
    code_of,
    message_of,
    translate,
)
from remuda.adapters.aws.clients import AwsClients, config
from remuda.adapters.system.clock import SystemIds
from remuda.domain.errors import RemudaError, UserError

#: Seconds to wait for a response: an upload or an invocation of a function takes longer than other calls.
READ_TIMEOUT_S = 300.0
PERMISSION_FIX = "use the credentials of an administrator, or grant this permission"
#: Names of the services in messages.
TITLES = {
    "cloudformation": "CloudFormation",
    "dynamodb": "DynamoDB",
    "ec2": "EC2",
    "events": "EventBridge",
    "iam": "IAM",
    "kms": "KMS",
    "lambda": "Lambda",
    "logs": "CloudWatch Logs",
    "s3": "S3",
    "secretsmanager": "Secrets Manager",
    "service-quotas": "Service Quotas",
    "ssm": "Systems Manager",
    "sts": "STS",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class AwsAccount:
    """The account, region and caller of the AWS credentials."""

    account_id: str
    partition: str
    region: str
    caller: str


class AwsApi:
    def __init__(self, clients: AwsClients) -> None:
        self._clients = clients

    @property
    def clients(self) -> AwsClients:
        return self._clients

    @property
    def region(self) -> str:
        return self._clients.region()

    async def call(self, service: str, operation: str, **parameters: Any) -> dict[str, Any]:
        try:
            return await self._call(service, operation, parameters)
        except FAILURES as error:
            raise _for_people(error, TITLES[service], operation) from error

    async def find(
        self, service: str, operation: str, missing: Collection[str], **parameters: Any
    ) -> dict[str, Any] | None:
        """The response, or None if the service answers with one of the codes `missing`."""
        try:
            return await self._call(service, operation, parameters)
        except FAILURES as error:
            if isinstance(error, ClientError) and code_of(error) in missing:
                return None
            raise _for_people(error, TITLES[service], operation) from error

    async def items(self, service: str, operation: str, key: str, **parameters: Any) -> AsyncIterator[Any]:
        """The elements of all pages of a list."""
        client = await self._client(service)
        try:
            async for page in client.get_paginator(xform_name(operation)).paginate(**parameters):
                for item in page.get(key) or ():
                    yield item
        except FAILURES as error:
            raise _for_people(error, TITLES[service], operation) from error

    def new_token(self) -> str:
        """Return a client token: the service recognises a request that botocore sends again after a lost answer."""
        return SystemIds().new("remuda-")

    async def endpoint(self, service: str) -> str:
        return str((await self._client(service)).meta.endpoint_url)

    async def account(self) -> AwsAccount:
        identity = await self.call("sts", "GetCallerIdentity")
        caller = str(identity["Arn"])
        return AwsAccount(
            account_id=str(identity["Account"]), partition=caller.split(":")[1], region=self.region, caller=caller
        )

    async def _client(self, service: str) -> Any:
        return await self._clients.client(service, TITLES[service], config(read_timeout_s=READ_TIMEOUT_S))

    async def _call(self, service: str, operation: str, parameters: dict[str, Any]) -> dict[str, Any]:
        client = await self._client(service)
        answer: dict[str, Any] = await await_response(getattr(client, xform_name(operation))(**parameters))
        return answer


def _for_people(error: Exception, service: str, operation: str) -> Exception:
    # Arguments that botocore rejects are a bug in Remuda.
    if isinstance(error, ParamValidationError):
        return error
    if isinstance(error, ClientError):
        code = code_of(error)
        text = f"{service} refuses ({operation}): {code}: {message_of(error)}"
        match category_of(code):
            case ErrorCategory.PERMISSION:
                return UserError(text, field="aws-permission", fix=PERMISSION_FIX)
            case ErrorCategory.INPUT if _status(error) < 500:
                return UserError(text, fix="correct what the message names")
    translated: RemudaError = translate(error, service, operation)
    return translated


def _status(error: ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def tags_of(tags: Any) -> dict[str, str]:
    """A list of tags as a mapping."""
    return {str(tag["Key"]): str(tag["Value"]) for tag in tags or ()}
