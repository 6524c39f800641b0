"""Secrets Manager: a credential that is read where it is used, and written down nowhere."""

from __future__ import annotations

import json
from typing import Any

from aiobotocore.config import AioConfig
from botocore.exceptions import ClientError

from remuda.adapters.aws.clients import AwsClients, config
from remuda.adapters.aws.errors import Kind, answered, code_of, kind_of, translated
from remuda.domain.errors import RemudaError, UserError

TITLE = "Secrets Manager"
_MISSING = "ResourceNotFoundException"
#: Marked for deletion.
_GOING = "InvalidRequestException"
_NO_KEY = frozenset({"DecryptionFailure", "KMSAccessDeniedException"})


async def read_secret(clients: AwsClients, arn: str, *, key: str, field: str) -> str:
    """The secret as it is; of one that is a JSON object, the value of `key`.

    `field` is the setting that named it, for errors. They quote the ARN, never the secret.
    """
    client = await clients.client("secretsmanager", TITLE, _in_region_of(arn))
    try:
        with translated(TITLE, arn):
            try:
                answer = await answered(client.get_secret_value(SecretId=arn))
            except ClientError as error:
                refusal = _refusal(error, arn, field)
                if refusal is None:
                    raise
                raise refusal from None
    except UserError as error:
        raise UserError(error.message, field=field, fix=error.fix) from None
    return _value(_text(answer, arn, field), arn, key, field)


def _in_region_of(arn: str) -> AioConfig:
    """A secret may live in another region than the pool."""
    return config().merge(AioConfig(region_name=arn.split(":")[3]))


def _refusal(error: ClientError, arn: str, field: str) -> RemudaError | None:
    code = code_of(error)
    if code == _MISSING:
        return UserError(f"there is no secret {arn}", field=field, fix="give the ARN of a secret of this account")
    if code == _GOING:
        return UserError(f"secret {arn} is marked for deletion", field=field, fix="restore it, or name another")
    if kind_of(code) is Kind.PERMISSION:
        return UserError(
            f"these AWS credentials may not read secret {arn}",
            field=field,
            fix="allow them secretsmanager:GetSecretValue on it",
        )
    if code in _NO_KEY:
        return UserError(
            f"secret {arn} cannot be decrypted with these AWS credentials",
            field=field,
            fix="allow them kms:Decrypt with the secret's key",
        )
    return None


def _text(answer: dict[str, Any], arn: str, field: str) -> str:
    if "SecretString" in answer:
        return str(answer["SecretString"])
    try:
        return bytes(answer.get("SecretBinary", b"")).decode()
    except UnicodeDecodeError:
        raise UserError(f"secret {arn} is no text", field=field, fix="store the credential as text") from None


def _value(text: str, arn: str, key: str, field: str) -> str:
    text = text.strip()
    fix = f'store the credential as plain text, or as JSON: {{"{key}": "…"}}'
    if text.startswith("{"):
        try:
            document = json.loads(text)
        except (ValueError, RecursionError):
            raise UserError(f"secret {arn} begins like JSON and is none", field=field, fix=fix) from None
        found = document.get(key)
        if not isinstance(found, str):
            raise UserError(f"secret {arn} has no {key!r}", field=field, fix=fix)
        text = found.strip()
    if not text:
        raise UserError(f"secret {arn} is empty", field=field, fix=fix)
    return text
