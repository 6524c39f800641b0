"""Who a machine is to AWS. Its records' keys carry that, so that a policy can bind it to them (`${aws:userid}`)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from botocore.exceptions import ClientError

from remuda.adapters.aws.ec2.options import PROFILE, Options
from remuda.adapters.aws.errors import Kind, answered, code_of, kind_of, translated
from remuda.domain.errors import Unavailable, UserError
from remuda.domain.resources import MAX_SHOWN
from remuda.ports.calls import CallCounter

if TYPE_CHECKING:
    from types_aiobotocore_iam import IAMClient
    from types_aiobotocore_sts import STSClient

_UNKNOWN = "NoSuchEntity"
_ROLE_ID = re.compile(r"[A-Z0-9]{16,128}")


async def key_prefix_of(client: IAMClient, launch: Mapping[str, str], calls: CallCounter) -> str:
    """What stands before the instance id in the user id of machines that are launched so."""
    # By name or ARN.
    name = Options.parse(launch).profile.rpartition("/")[2]
    with calls.counted("iam", "GetInstanceProfile"):
        return f"{await _role_id_of(client, name)}:"


async def _role_id_of(client: IAMClient, name: str) -> str:
    """The unique id of the role in an instance profile."""
    try:
        with translated("IAM", name):
            answer = await _get_profile(client, name)
    except UserError as error:
        error.field = error.field or PROFILE
        raise
    roles: list[dict[str, Any]] = answer["InstanceProfile"].get("Roles", [])
    if not roles:
        raise UserError(
            f"{PROFILE} {name[:MAX_SHOWN]!r} has no role", field=PROFILE, fix="put the agents' role into the profile"
        )
    role_id = str(roles[0].get("RoleId", ""))
    if not _ROLE_ID.fullmatch(role_id):
        raise Unavailable(f"IAM gives {role_id[:MAX_SHOWN]!r} as the id of the role in {name}")
    return role_id


async def _get_profile(client: IAMClient, name: str) -> Any:
    try:
        return await answered(client.get_instance_profile(InstanceProfileName=name))
    except ClientError as error:
        if code_of(error) == _UNKNOWN:
            raise UserError(
                f"there is no instance profile {name[:MAX_SHOWN]!r} in this account",
                field=PROFILE,
                fix="give the one that deploy/cloudformation.yml makes, or one of your own with the agent's policy",
            ) from None
        if kind_of(code_of(error)) is Kind.PERMISSION:
            raise UserError(
                f"the instance profile {name[:MAX_SHOWN]!r} may not be read",
                field=PROFILE,
                fix="allow iam:GetInstanceProfile on it to whoever runs refresh: records are bound to its role",
            ) from None
        raise


async def own_key_prefix(client: STSClient, instance_id: str) -> str:
    """Of the machine whose credentials the client has."""
    with translated("STS", "the machine's identity"):
        answer = await answered(client.get_caller_identity())
    user_id = str(answer.get("UserId", ""))
    if not _ROLE_ID.fullmatch(user_id.removesuffix(f":{instance_id}")) or ":" not in user_id:
        raise UserError(
            f"the AWS credentials are those of {user_id[:MAX_SHOWN]!r}, not those of machine {instance_id}",
            fix="let the agent use the machine's own role: give it no other credentials",
        )
    return user_id.removesuffix(instance_id)
