"""Credentials in AWS Secrets Manager. They are read when needed and never stored."""

from __future__ import annotations

import json
from typing import Any

from aiobotocore.config import AioConfig
from botocore.exceptions import ClientError

from remuda.adapters.aws.calls import await_response
from remuda.adapters.aws.clients import AwsClients, config
from remuda.adapters.aws.errors import ErrorCategory, category_of, code_of, translated
from remuda.domain.errors import RemudaError, UserError

TITLE = "Secrets Manager"
_MISSING = "ResourceNotFoundException"
#: The secret is scheduled for deletion.
_BEING_DELETED = "InvalidRequestException"
_DECRYPTION_FAILED = frozenset({"DecryptionFailure", "KMSAccessDeniedException"})


async def read_secret(clients: AwsClients, arn: str, *, key: str, field: str) -> str:
    """The text of a secret, or the value of `key` if the secret is a JSON object.

    `field` is the setting that contains the ARN. Errors name both, never the secret.
    """
    client = await clients.client("secretsmanager", TITLE, _in_region_of(arn))
    try:
        with translated(TITLE, arn):
            try:
                answer = await await_response(client.get_secret_value(SecretId=arn))
            except ClientError as error:
                known = _known_error(error, arn, field)
                if known is None:
                    raise
                raise known from None
    except UserError as error:
        raise UserError(error.message, field=field, fix=error.fix) from None
    return _value(_text(answer, arn, field), arn, key, field)


def _in_region_of(arn: str) -> AioConfig:
    """The client settings for the secret's region, which may differ from the pool's."""
    return config().merge(AioConfig(region_name=arn.split(":")[3]))


def _known_error(error: ClientError, arn: str, field: str) -> RemudaError | None:
    code = code_of(error)
    if code == _MISSING:
        return UserError(f"secret {arn} does not exist", field=field, fix="set the ARN of a secret of this account")
    if code == _BEING_DELETED:
        return UserError(f"secret {arn} is scheduled for deletion", field=field, fix="restore it, or set another ARN")
    if category_of(code) is ErrorCategory.PERMISSION:
        return UserError(
            f"the AWS credentials do not permit reading secret {arn}",
            field=field,
            fix="grant secretsmanager:GetSecretValue on it",
        )
    if code in _DECRYPTION_FAILED:
        return UserError(
            f"the AWS credentials do not permit decrypting secret {arn}",
            field=field,
            fix="grant kms:Decrypt on the secret's key",
        )
    return None


def _text(answer: dict[str, Any], arn: str, field: str) -> str:
    if "SecretString" in answer:
        return str(answer["SecretString"])
    try:
        return bytes(answer.get("SecretBinary", b"")).decode()
    except UnicodeDecodeError:
        raise UserError(f"secret {arn} is not text", field=field, fix="store the credential as text") from None


def _value(text: str, arn: str, key: str, field: str) -> str:
    text = text.strip()
    fix = f'store the credential as plain text, or as JSON: {{"{key}": "…"}}'
    if text.startswith("{"):
        try:
            document = json.loads(text)
        except (ValueError, RecursionError):
            raise UserError(f"secret {arn} starts with {{ but is not valid JSON", field=field, fix=fix) from None
        value = document.get(key)
        if not isinstance(value, str):
            raise UserError(f"secret {arn} has no key {key!r}", field=field, fix=fix)
        text = value.strip()
    if not text:
        raise UserError(f"secret {arn} is empty", field=field, fix=fix)
    return text
