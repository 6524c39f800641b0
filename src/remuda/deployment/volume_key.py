"""The KMS key of the instances' disks, and whether EC2 may use it in the name of Remuda's roles.

Companies set a key of their own as the account's default key of EBS. Remuda's volumes are always encrypted, so EC2
takes that key if `volume-kms-key` is not set. If the caller of a launch may not use the key, the launch succeeds, and
EC2 ends the instances seconds later with Client.InternalError or Client.InvalidKMSKey.InvalidState
(aws/karpenter-provider-aws issues 1407 and 4935, github-aws-runners/terraform-aws-github-runner issue 3546).
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from remuda.deployment.api import AwsAccount, AwsApi
from remuda.deployment.policies import policies
from remuda.domain.errors import RemudaError
from remuda.ports.doctor import CheckResult, CheckStatus, ok, problem, warning

#: What GetEbsDefaultKmsKeyId returns if the account has no key of its own.
AWS_KEY = "alias/aws/ebs"
_NOT_FOUND = frozenset({"NotFoundException"})
_NO_SNAPSHOT = frozenset({"InvalidSnapshot.NotFound"})
#: Actions that EC2 Auto Scaling needs on the default key, to launch the listener's instance ("Required AWS KMS key
#: policy for use with encrypted volumes" in its User Guide).
_AUTO_SCALING_ACTIONS = (
    *("kms:CreateGrant", "kms:Decrypt", "kms:DescribeKey", "kms:Encrypt", "kms:GenerateDataKey", "kms:ReEncryptFrom"),
    *("kms:GenerateDataKeyWithoutPlaintext", "kms:ReEncryptTo"),
)


@dataclass(frozen=True, kw_only=True)
class VolumeKey:
    """The result of the check. `adopted` is the key to set as `volume-kms-key`, or empty."""

    result: CheckResult
    adopted: str = ""


async def check_volume_key(
    api: AwsApi, account: AwsAccount, *, given: str, images: Sequence[Mapping[str, Any]], has_listener: bool
) -> VolumeKey:
    """Decide on the key of the volumes and check its state and its policy.

    `given` is the key that the user or the stack has set. Without one, the account's own default key is adopted, or the
    key of the images: the policy `volume-key` gives the roles of the pool the permissions on one key.
    """
    try:
        default = await _own_key(api, str((await api.call("ec2", "GetEbsDefaultKmsKeyId"))["KmsKeyId"]))
        of_images = {str(item["ImageId"]): key for item in images if (key := await _key_of_image(api, item))}
        chosen = given or default or next(iter(of_images.values()), "")
        for image, key in of_images.items():
            if key != chosen:
                return VolumeKey(result=_other_key(image, key, chosen, account.region))
        if not chosen:
            return VolumeKey(result=ok("the key that AWS manages for EBS"))
        result = await _judge(api, account, chosen)
        if default and has_listener and result.status is CheckStatus.OK:
            result = await _judge_listener(api, account, default) or result
        return VolumeKey(result=result, adopted="" if given else chosen)
    except RemudaError as error:
        fix = "grant ec2:GetEbsDefaultKmsKeyId, ec2:DescribeSnapshots, kms:DescribeKey and kms:GetKeyPolicy to check it"
        return VolumeKey(result=warning(f"the KMS key of the volumes was not checked: {error.message}", fix))


async def _own_key(api: AwsApi, key: str) -> str:
    """The ARN of a key that the customer manages; empty for one that AWS manages, which every role may use."""
    if key.endswith(AWS_KEY):
        return ""
    metadata = await _metadata(api, key)
    return key if metadata is None else str(metadata["Arn"]) if metadata["KeyManager"] == "CUSTOMER" else ""


async def _metadata(api: AwsApi, key: str) -> Mapping[str, Any] | None:
    answer = await api.find("kms", "DescribeKey", _NOT_FOUND, KeyId=key)
    return None if answer is None else answer["KeyMetadata"]


async def _key_of_image(api: AwsApi, image: Mapping[str, Any]) -> str:
    """The customer's key of the image's encrypted snapshots, or empty."""
    volumes = [item.get("Ebs") or {} for item in image.get("BlockDeviceMappings") or ()]
    snapshots = [str(each["SnapshotId"]) for each in volumes if each.get("Encrypted") and each.get("SnapshotId")]
    if not snapshots:
        return ""
    answer = await api.find("ec2", "DescribeSnapshots", _NO_SNAPSHOT, SnapshotIds=snapshots)
    keys = [str(item["KmsKeyId"]) for item in (answer or {}).get("Snapshots") or () if item.get("KmsKeyId")]
    return await _own_key(api, keys[0]) if keys else ""


def _other_key(image: str, key: str, chosen: str, region: str) -> CheckResult:
    return problem(
        f"{image} is encrypted with {key}, and the volumes with {chosen}, but the roles of the pool may use one key",
        f"copy the image: aws ec2 copy-image --encrypted --kms-key-id {chosen} --source-region {region} "
        f"--source-image-id {image} --name remuda-{image}, and give the copy as the image",
    )


async def _judge(api: AwsApi, account: AwsAccount, key: str) -> CheckResult:
    """Whether the key can be used, and its policy lets the roles of the pool use it."""
    metadata = await _metadata(api, key)
    if metadata is None:
        return problem(f"KMS key {key} does not exist in this region", "give another --volume-kms-key")
    if metadata["KeyState"] != "Enabled":
        return problem(
            f"KMS key {key} is {metadata['KeyState']}: EC2 would end every instance after its launch",
            f"run aws kms enable-key --key-id {key}, or give another --volume-kms-key",
        )
    # "Amazon EBS does not support asymmetric KMS keys" (Amazon EBS User Guide).
    if metadata.get("KeySpec", "SYMMETRIC_DEFAULT") != "SYMMETRIC_DEFAULT":
        return problem(
            f"KMS key {key} is not symmetric, and EBS needs a symmetric one", "give another --volume-kms-key"
        )
    root = f"arn:{account.partition}:iam::{account.account_id}:root"
    needed = sorted(
        {action for each in policies() if each.name == "volume-key" for action in _actions(each.document())}
    )
    via = f"ec2.{account.region}.amazonaws.com"
    if not _allows(await _policy(api, key), {root, account.account_id}, needed, via):
        statement = _statement("RemudaVolumes", root, needed) | {
            "Condition": {"StringEquals": {"kms:ViaService": via}},
        }
        return problem(f"the policy of KMS key {key} does not let the roles of this account use it", _add(statement))
    return ok(f"{key}: the roles of the pool get the permissions")


async def _judge_listener(api: AwsApi, account: AwsAccount, key: str) -> CheckResult | None:
    """A warning if EC2 Auto Scaling may not use the default key: only the key's policy can permit it."""
    role = "role/aws-service-role/autoscaling.amazonaws.com/AWSServiceRoleForAutoScaling"
    principal = f"arn:{account.partition}:iam::{account.account_id}:{role}"
    via = f"ec2.{account.region}.amazonaws.com"
    if _allows(await _policy(api, key), {principal}, _AUTO_SCALING_ACTIONS, via):
        return None
    return warning(
        f"the policy of KMS key {key}, the account's default key, does not let EC2 Auto Scaling use it: the listener's "
        "instance would end after its launch",
        _add(_statement("RemudaListener", principal, _AUTO_SCALING_ACTIONS)),
    )


async def _policy(api: AwsApi, key: str) -> Iterable[Mapping[str, Any]]:
    document = json.loads((await api.call("kms", "GetKeyPolicy", KeyId=key, PolicyName="default"))["Policy"])
    statements = document.get("Statement") or []
    return statements if isinstance(statements, list) else [statements]


def _allows(
    statements: Iterable[Mapping[str, Any]], principals: Collection[str], needed: Iterable[str], via: str
) -> bool:
    """Whether statements for one of the principals, or for everybody, allow all actions to calls through EC2."""
    allowed = [
        pattern
        for item in statements
        if item.get("Effect") == "Allow" and _is_via(item, via) and _principals(item) & {*principals, "*"}
        for pattern in _list(item.get("Action"))
    ]
    return all(any(fnmatch.fnmatchcase(action.lower(), each.lower()) for each in allowed) for action in needed)


def _is_via(statement: Mapping[str, Any], via: str) -> bool:
    """Whether the statement applies to calls of EC2, as far as its condition of the calling service says."""
    for keys in (statement.get("Condition") or {}).values():
        for name, values in keys.items():
            if name.lower() == "kms:viaservice":
                return any(fnmatch.fnmatchcase(via, each) for each in _list(values))
    return True


def _principals(statement: Mapping[str, Any]) -> set[str]:
    principal = statement.get("Principal")
    return set(_list(principal.get("AWS"))) if isinstance(principal, Mapping) else set(_list(principal))


def _list(value: Any) -> list[str]:
    return [str(each) for each in value] if isinstance(value, list) else [str(value)] if value else []


def _actions(document: Mapping[str, Any]) -> list[str]:
    return [action for statement in document["Statement"] for action in _list(statement["Action"])]


def _statement(sid: str, principal: str, actions: Sequence[str]) -> dict[str, Any]:
    return {"Sid": sid, "Effect": "Allow", "Principal": {"AWS": principal}, "Action": list(actions), "Resource": "*"}


def _add(statement: Mapping[str, Any]) -> str:
    return f"add this statement to the key's policy: {json.dumps(statement)}"
