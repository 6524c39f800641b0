"""The check of the KMS key of the volumes before a deployment: adopted, or refused with what its policy lacks."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any

import pytest

from remuda.deployment.api import AwsAccount
from remuda.deployment.deploy import plan_stack
from remuda.deployment.volume_key import VolumeKey, check_volume_key
from remuda.domain.errors import UserError
from remuda.ports.doctor import CheckStatus
from tests.support.aws.scripted_api import ScriptedApi
from tests.unit.deploy.test_deployment import facts, request

ACCOUNT_ID, REGION = "123456789012", "eu-central-1"
ACCOUNT = AwsAccount(account_id=ACCOUNT_ID, partition="aws", region=REGION, caller="arn:aws:iam::123456789012:user/x")
KEY, OTHER = (f"arn:aws:kms:{REGION}:{ACCOUNT_ID}:key/{name * 8}" for name in "12")
#: Of another account, which shares its images.
SHARED = f"arn:aws:kms:{REGION}:210987654321:key/33333333"
ROOT = f"arn:aws:iam::{ACCOUNT_ID}:root"
AUTO_SCALING = f"arn:aws:iam::{ACCOUNT_ID}:role/aws-service-role/autoscaling.amazonaws.com/AWSServiceRoleForAutoScaling"
PLAIN_IMAGE = {"ImageId": "ami-1", "BlockDeviceMappings": [{"Ebs": {"SnapshotId": "snap-1", "Encrypted": False}}]}
ENCRYPTED_IMAGE = {"ImageId": "ami-2", "BlockDeviceMappings": [{"Ebs": {"SnapshotId": "snap-2", "Encrypted": True}}]}


def allow(principal: Any, *actions: str, **conditions: Any) -> dict[str, Any]:
    return {
        "Effect": "Allow",
        "Principal": principal,
        "Action": list(actions),
        "Resource": "*",
        "Condition": conditions,
    }


#: The policy that KMS gives a key by default: IAM policies of the account decide.
DEFAULT_POLICY = allow({"AWS": ROOT}, "kms:*")


class Keys(ScriptedApi):
    """The default key of EBS, KMS and the snapshots of images. Snapshots are encrypted with `of_snapshot`."""

    def __init__(self, default: str = KEY, *statements: dict[str, Any], of_snapshot: str = "", **metadata: Any) -> None:
        super().__init__(
            GetEbsDefaultKmsKeyId=[{"KmsKeyId": default}],
            GetKeyPolicy=[{"Policy": json.dumps({"Statement": statements or [DEFAULT_POLICY]})}],
            DescribeSnapshots=[{"Snapshots": [{"KmsKeyId": of_snapshot}]}],
        )
        self._metadata = {"KeyManager": "CUSTOMER", "KeyState": "Enabled", "KeySpec": "SYMMETRIC_DEFAULT", **metadata}

    def _answer(self, service: str, operation: str, parameters: dict[str, Any]) -> Any:
        # KMS shows the policy of a key to its own account only.
        assert operation != "GetKeyPolicy" or parameters["KeyId"] != SHARED
        if operation == "DescribeKey":
            return {"KeyMetadata": {**self._metadata, "Arn": parameters["KeyId"]}}
        return super()._answer(service, operation, parameters)


async def check(
    api: Any,
    *,
    given: str = "",
    given_of_image: str = "",
    image: Any = PLAIN_IMAGE,
    more: Sequence[Any] = (),
    has_listener: bool = False,
) -> VolumeKey:
    return await check_volume_key(
        api, ACCOUNT, given=given, given_of_image=given_of_image, images=[image, *more], has_listener=has_listener
    )


async def test_a_default_key_of_the_account_becomes_the_key_of_the_volumes() -> None:
    key = await check(Keys())
    assert (key.result.status, key.adopted) == (CheckStatus.OK, KEY)
    plan = plan_stack(request(), facts(volume_key=key.adopted), secret="arn:secret", groups="sg-1")
    assert plan.parameters["VolumeKmsKey"] == KEY


@pytest.mark.parametrize(
    ("api", "given", "adopted"),
    [
        (Keys("alias/aws/ebs"), "", ""),
        (Keys(KeyManager="AWS"), "", ""),
        (Keys(), OTHER, ""),
        (Keys("alias/aws/ebs", of_snapshot=OTHER), "", OTHER),
        (Keys(of_snapshot=KEY), "", KEY),
    ],
    ids=["of AWS", "of AWS, by its ARN", "given", "of the image", "of image and account"],
)
async def test_one_key_serves_volumes_and_images(api: Any, given: str, adopted: str) -> None:
    image = ENCRYPTED_IMAGE if adopted in {OTHER, KEY} else PLAIN_IMAGE
    key = await check(api, given=given, image=image)
    assert (key.result.status, key.adopted) == (CheckStatus.OK, adopted)


@pytest.mark.parametrize(
    ("api", "adopted", "of_image"),
    [
        (Keys(of_snapshot=OTHER), KEY, OTHER),
        (Keys(of_snapshot=SHARED), KEY, SHARED),
        # EC2 encrypts volumes of a shared image with the default key, here that of AWS.
        (Keys("alias/aws/ebs", of_snapshot=SHARED), "", SHARED),
    ],
    ids=["own", "of another account", "of another account beside that of AWS"],
)
async def test_an_image_may_have_another_key_than_the_volumes(api: Any, adopted: str, of_image: str) -> None:
    key = await check(api, image=ENCRYPTED_IMAGE)
    assert (key.result.status, key.adopted, key.of_image) == (CheckStatus.OK, adopted, of_image)
    assert of_image in key.result.message
    known = facts(volume_key=key.adopted, image_key=key.of_image)
    plan = plan_stack(request(), known, secret="arn:secret", groups="sg-1")
    assert (plan.parameters.get("VolumeKmsKey", ""), plan.parameters["ImageKmsKey"]) == (adopted, of_image)


async def test_images_with_two_more_keys_are_a_problem() -> None:
    class Two(Keys):
        def _answer(self, service: str, operation: str, parameters: dict[str, Any]) -> Any:
            if operation == "DescribeSnapshots":
                (name,) = parameters["SnapshotIds"]
                return {"Snapshots": [{"KmsKeyId": {"snap-2": OTHER, "snap-3": SHARED}[name]}]}
            return super()._answer(service, operation, parameters)

    third = {"ImageId": "ami-3", "BlockDeviceMappings": [{"Ebs": {"SnapshotId": "snap-3", "Encrypted": True}}]}
    key = await check(Two(), image=ENCRYPTED_IMAGE, more=[third])
    assert key.result.status is CheckStatus.PROBLEM
    assert OTHER in key.result.message
    assert SHARED in key.result.message
    assert f"aws ec2 copy-image --encrypted --kms-key-id {KEY} --source-region {REGION}" in key.result.fix


async def test_a_key_that_its_owner_does_not_share_is_a_problem() -> None:
    class Unshared(Keys):
        def _answer(self, service: str, operation: str, parameters: dict[str, Any]) -> Any:
            if operation == "DescribeKey" and parameters["KeyId"] == SHARED:
                raise UserError("KMS refuses (DescribeKey): AccessDeniedException: no", field="aws-permission")
            return super()._answer(service, operation, parameters)

    result = (await check(Unshared(of_snapshot=SHARED), image=ENCRYPTED_IMAGE)).result
    assert result.status is CheckStatus.PROBLEM
    assert json.loads(result.fix.partition(": ")[2])["Principal"] == {"AWS": ROOT}


async def test_an_encrypted_image_whose_snapshots_are_not_shared_is_a_warning_until_its_key_is_given() -> None:
    class Unseen(Keys):
        async def find(self, service: str, operation: str, missing: Collection[str], **parameters: Any) -> Any:
            if operation == "DescribeSnapshots":
                assert "InvalidSnapshot.NotFound" in missing
                return None
            return await super().find(service, operation, missing, **parameters)

    result = (await check(Unseen(), image=ENCRYPTED_IMAGE)).result
    assert (result.status, "ImageKmsKey=ARN" in result.fix) == (CheckStatus.WARNING, True)
    given = await check(Unseen(), given_of_image=SHARED, image=ENCRYPTED_IMAGE)
    assert (given.result.status, given.of_image) == (CheckStatus.OK, "")


@pytest.mark.parametrize(
    ("metadata", "words"),
    [({"KeyState": "Disabled"}, "aws kms enable-key"), ({"KeySpec": "RSA_2048"}, "give another --volume-kms-key")],
)
async def test_a_key_that_ebs_cannot_use_is_a_problem(metadata: dict[str, str], words: str) -> None:
    key = await check(Keys(**metadata))
    assert key.result.status is CheckStatus.PROBLEM
    assert words in key.result.fix


@pytest.mark.parametrize(
    ("statement", "is_enough"),
    [
        (DEFAULT_POLICY, True),
        (allow({"AWS": ACCOUNT_ID}, "kms:*"), True),
        (allow("*", "kms:*", StringEquals={"kms:ViaService": f"ec2.{REGION}.amazonaws.com"}), True),
        (allow("*", "kms:*", StringEquals={"kms:ViaService": f"rds.{REGION}.amazonaws.com"}), False),
        (allow({"AWS": f"arn:aws:iam::{ACCOUNT_ID}:role/admin"}, "kms:*"), False),
        (allow({"AWS": ROOT}, "kms:Describe*", "kms:CreateGrant"), False),
        (allow({"AWS": ROOT}, "kms:De*", "kms:CreateGrant", "kms:GenerateDataKey*", "kms:ReEncrypt*"), True),
        ({**DEFAULT_POLICY, "Effect": "Deny"}, False),
    ],
)
async def test_the_policy_of_the_key_must_let_roles_of_the_account_use_it(
    statement: dict[str, Any], *, is_enough: bool
) -> None:
    result = (await check(Keys(KEY, statement))).result
    assert (result.status is CheckStatus.OK) is is_enough
    if not is_enough:
        printed = json.loads(result.fix.partition(": ")[2])
        assert printed["Principal"] == {"AWS": ROOT}
        # What the advice says is enough.
        assert (await check(Keys(KEY, printed))).result.status is CheckStatus.OK


async def test_the_listener_needs_its_own_statement_on_the_default_key() -> None:
    result = (await check(Keys(), has_listener=True)).result
    assert result.status is CheckStatus.WARNING
    printed = json.loads(result.fix.partition(": ")[2])
    assert printed["Principal"] == {"AWS": AUTO_SCALING}
    assert (await check(Keys(KEY, DEFAULT_POLICY, printed), has_listener=True)).result.status is CheckStatus.OK
    # The listener's own volume has the default key, whatever the key of the pool is.
    assert (await check(Keys(), given=OTHER, has_listener=True)).result.status is CheckStatus.WARNING


async def test_a_key_that_may_not_be_read_is_a_warning() -> None:
    class Denied(Keys):
        def _answer(self, service: str, operation: str, parameters: dict[str, Any]) -> Any:
            if operation == "GetKeyPolicy":
                raise UserError("KMS refuses (GetKeyPolicy): AccessDeniedException: no", field="aws-permission")
            return super()._answer(service, operation, parameters)

    key = await check(Denied())
    assert key.result.status is CheckStatus.WARNING
    assert "kms:GetKeyPolicy" in key.result.fix
