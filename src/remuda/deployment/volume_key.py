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

from remuda.adapters.aws.account import AWS_KEY
from remuda.deployment.api import AwsAccount, AwsApi
from remuda.deployment.policies import policies
from remuda.domain.errors import RemudaError
from remuda.ports.doctor import CheckResult, CheckStatus, ok, problem, warning

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
    """The result of the check, and the keys to set as `volume-kms-key` and as `ImageKmsKey`, or empty."""

    result: CheckResult
    adopted: str = ""
    of_image: str = ""


async def check_volume_key(
    api: AwsApi,
    account: AwsAccount,
    *,
    given: str,
    given_of_image: str = "",
    images: Sequence[Mapping[str, Any]],
    has_listener: bool,
) -> VolumeKey:
    """Decide on the keys of volumes and images, and check their states and policies.

    `given` and `given_of_image` are the keys that the user or the stack has set. Without the first one, the account's
    own default key is adopted. The policies `volume-key` and `image-key` give the roles of the pool the permissions on
    one key each. Example: the default key of the account, and images that another account encrypts with its own key.
    """
    try:
        default = await _own_key(api, account, str((await api.call("ec2", "GetEbsDefaultKmsKeyId"))["KmsKeyId"]))
        of_images = {str(item["ImageId"]): await _key_of_image(api, account, item) for item in images}
        known = {image: key for image, key in of_images.items() if key}
        # EC2 encrypts the volume of an owned image with the image's key, if the launch names none.
        owned = (key for key in known.values() if not _is_foreign(key, account))
        chosen = given or default or next(owned, "")
        others = sorted({key for key in known.values() if key != chosen})
        if len(others) > 1:
            image = next(image for image, key in known.items() if key == others[1])
            return VolumeKey(result=_other_key(image, others, chosen, account.region))
        (of_image,) = others or ("",)
        results = [await _judge(api, account, key) for key in (chosen, of_image) if key]
        if default and has_listener:
            results += [each for each in [await _judge_listener(api, account, default)] if each]
        unknown = [image for image, key in of_images.items() if key is None]
        if unknown and not given_of_image:
            results.append(_unknown_key(unknown))
        return VolumeKey(result=_summary(results), adopted="" if given else chosen, of_image=of_image)
    except RemudaError as error:
        fix = "grant ec2:GetEbsDefaultKmsKeyId, ec2:DescribeSnapshots, kms:DescribeKey and kms:GetKeyPolicy to check it"
        return VolumeKey(result=warning(f"the KMS key of the volumes was not checked: {error.message}", fix))


async def _own_key(api: AwsApi, account: AwsAccount, key: str) -> str:
    """The ARN of a key that a customer manages; empty for one that AWS manages, which every role may use."""
    if key.endswith(AWS_KEY):
        return ""
    # Keys that AWS manages cannot be shared, and KMS may refuse to describe another account's key.
    if _is_foreign(key, account):
        return key
    metadata = await _metadata(api, key)
    return key if metadata is None else str(metadata["Arn"]) if metadata["KeyManager"] == "CUSTOMER" else ""


async def _metadata(api: AwsApi, key: str) -> Mapping[str, Any] | None:
    answer = await api.find("kms", "DescribeKey", _NOT_FOUND, KeyId=key)
    return None if answer is None else answer["KeyMetadata"]


async def _key_of_image(api: AwsApi, account: AwsAccount, image: Mapping[str, Any]) -> str | None:
    """The customer's key of the image's encrypted snapshots, or empty. None if only the image is shared, not them."""
    volumes = [item.get("Ebs") or {} for item in image.get("BlockDeviceMappings") or ()]
    snapshots = [str(each["SnapshotId"]) for each in volumes if each.get("Encrypted") and each.get("SnapshotId")]
    if not snapshots:
        return ""
    answer = await api.find("ec2", "DescribeSnapshots", _NO_SNAPSHOT, SnapshotIds=snapshots)
    keys = [str(item["KmsKeyId"]) for item in (answer or {}).get("Snapshots") or () if item.get("KmsKeyId")]
    return await _own_key(api, account, keys[0]) if keys else None


def _summary(results: Sequence[CheckResult]) -> CheckResult:
    """The worst result, or all if there is nothing to do."""
    for status in (CheckStatus.PROBLEM, CheckStatus.WARNING):
        if found := [each for each in results if each.status is status]:
            return found[0]
    return ok("; ".join(each.message for each in results) or "the key that AWS manages for EBS")


def _account_of(key: str) -> str:
    """The account in the ARN of a key."""
    return key.split(":")[4]


def _is_foreign(key: str, account: AwsAccount) -> bool:
    return key.startswith("arn:") and _account_of(key) != account.account_id


def _other_key(image: str, others: Sequence[str], chosen: str, region: str) -> CheckResult:
    first, second = others[:2]
    return problem(
        f"images are encrypted with {first} and {second}, but the roles of the pool may use one key of images",
        f"copy the image: aws ec2 copy-image --encrypted --kms-key-id {chosen or first} --source-region {region} "
        f"--source-image-id {image} --name remuda-{image}, and give the copy as the image",
    )


def _unknown_key(images: Sequence[str]) -> CheckResult:
    return warning(
        f"{', '.join(images)}: encrypted, and the snapshots cannot be read, so the key is not known",
        "ask the owner of the image for the ARN of its key and give it with --parameter ImageKmsKey=ARN, unless AWS "
        "manages it",
    )


async def _judge(api: AwsApi, account: AwsAccount, key: str) -> CheckResult:
    """Whether the key can be used, and its policy lets the roles of the pool use it."""
    is_foreign = _is_foreign(key, account)
    try:
        metadata = await _metadata(api, key)
    except RemudaError:
        if is_foreign:
            return _foreign_key(account, key)
        raise
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
    shown = f"{key}: the roles of the pool get the permissions"
    if is_foreign:
        # DescribeKey has worked, so its policy knows this account; KMS shows it to its owner only.
        return ok(f"{shown}, if its owner {_account_of(key)} allows this account to use it")
    statement = _needed_statement(account)
    allowed = {statement["Principal"]["AWS"], account.account_id}
    if not _allows(await _policy(api, key), allowed, statement["Action"], _via(account)):
        return problem(f"the policy of KMS key {key} does not let the roles of this account use it", _add(statement))
    return ok(shown)


def _foreign_key(account: AwsAccount, key: str) -> CheckResult:
    return problem(
        f"KMS key {key} of account {_account_of(key)} may not be used by this account",
        f"let its owner {_add(_needed_statement(account))}",
    )


def _needed_statement(account: AwsAccount) -> dict[str, Any]:
    """What the policy of a key must say, so that the roles of the account may get permissions on it."""
    needed = {action for each in policies() if each.name == "volume-key" for action in _actions(each.document())}
    root = f"arn:{account.partition}:iam::{account.account_id}:root"
    condition = {"Condition": {"StringEquals": {"kms:ViaService": _via(account)}}}
    return _statement("RemudaVolumes", root, sorted(needed)) | condition


def _via(account: AwsAccount) -> str:
    return f"ec2.{account.region}.amazonaws.com"


async def _judge_listener(api: AwsApi, account: AwsAccount, key: str) -> CheckResult | None:
    """A warning if EC2 Auto Scaling may not use the default key: only the key's policy can permit it."""
    role = "role/aws-service-role/autoscaling.amazonaws.com/AWSServiceRoleForAutoScaling"
    principal = f"arn:{account.partition}:iam::{account.account_id}:{role}"
    if _allows(await _policy(api, key), {principal}, _AUTO_SCALING_ACTIONS, _via(account)):
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
