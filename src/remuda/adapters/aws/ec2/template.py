"""The pool's launch template. A new version is created only if the content changed."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from botocore.exceptions import ClientError

from remuda.adapters.aws.ec2.calls import Ec2Calls
from remuda.adapters.aws.ec2.options import (
    AMI,
    DEFAULT_VOLUME_GIB,
    VOLUME_SIZE,
    Ec2LaunchOptions,
    RootVolume,
)
from remuda.adapters.aws.user_data import compress
from remuda.domain.errors import Unavailable, UserError
from remuda.ports.compute import POOL_TAG

if TYPE_CHECKING:
    from types_aiobotocore_ec2.type_defs import (
        LaunchTemplateBlockDeviceMappingRequestTypeDef,
        LaunchTemplateEbsBlockDeviceRequestTypeDef,
        RequestLaunchTemplateDataTypeDef,
        TagTypeDef,
    )

#: Prefix of the description of each version created by Remuda, followed by a digest of its content.
DESCRIPTION_PREFIX = "remuda "
DIGEST_CHARS = 32
_ALREADY_EXISTS = frozenset({"InvalidLaunchTemplateName.AlreadyExistsException"})
TEMPLATE_MISSING = frozenset({"InvalidLaunchTemplateName.NotFoundException", "InvalidLaunchTemplateId.NotFound"})


def template_name(pool: str) -> str:
    return f"remuda-{pool}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RootDevice:
    """The root volume of an image."""

    name: str
    gib: int


def root_device(image: Mapping[str, Any], label: str, *, field: str = AMI) -> RootDevice:
    """The root volume of an image that DescribeImages returned. `label` is the image as the user wrote it."""
    name = str(image.get("RootDeviceName", ""))
    volumes = {str(each.get("DeviceName", "")): each.get("Ebs") or {} for each in image.get("BlockDeviceMappings", ())}
    if not name or image.get("RootDeviceType", "ebs") != "ebs":
        raise UserError(f"{label} has no root volume on EBS", field=field, fix="give an image with an EBS root volume")
    size = volumes.get(name, {}).get("VolumeSize")
    return RootDevice(name=name, gib=size if isinstance(size, int) else 0)


def check_same_root(label: str, own: RootDevice, root: RootDevice, volume: RootVolume, *, field: str) -> None:
    """Check that the root volume of the template also fits another image.

    A fleet cannot replace it: a mapping with another name in an override adds a volume (API reference of
    FleetBlockDeviceMappingRequest).
    """
    if own.name != root.name:
        raise UserError(
            f"{label} has the root device {own.name}, and the image of the pool has {root.name}",
            field=field,
            fix=f"give an image with the root device {root.name}, or use another pool",
        )
    if own.gib > _gib(volume, root):
        raise UserError(
            f"{label} has a root volume of {own.gib} GiB, and the volumes of the pool have {_gib(volume, root)} GiB",
            field=VOLUME_SIZE,
            fix=f"set {VOLUME_SIZE} to {own.gib} or more",
        )


def _gib(volume: RootVolume, root: RootDevice) -> int:
    return volume.gib or max(DEFAULT_VOLUME_GIB, root.gib)


def _root_volume(volume: RootVolume, root: RootDevice) -> LaunchTemplateBlockDeviceMappingRequestTypeDef:
    if volume.gib is not None and volume.gib < root.gib:
        raise UserError(
            f"{VOLUME_SIZE} is {volume.gib}, but the root volume of the image has {root.gib} GiB",
            field=VOLUME_SIZE,
            fix=f"set {VOLUME_SIZE} to {root.gib} or more",
        )
    ebs: LaunchTemplateEbsBlockDeviceRequestTypeDef = {
        "VolumeSize": _gib(volume, root),
        "VolumeType": volume.type,  # type: ignore[typeddict-item]  # one of VOLUME_TYPES
        "Encrypted": True,
        "DeleteOnTermination": True,
    }
    if volume.iops is not None:
        ebs["Iops"] = volume.iops
    if volume.throughput is not None:
        ebs["Throughput"] = volume.throughput
    if volume.kms_key:
        ebs["KmsKeyId"] = volume.kms_key
    return {"DeviceName": root.name, "Ebs": ebs}


def pool_tags(own: Mapping[str, str], pool: str) -> list[TagTypeDef]:
    """The own tags and that of the pool, in the form of EC2's calls."""
    return [{"Key": key, "Value": value} for key, value in {**own, POOL_TAG: pool}.items()]


def template_data(
    options: Ec2LaunchOptions, user_data: str, pool: str, root: RootDevice
) -> RequestLaunchTemplateDataTypeDef:
    profile = options.profile
    data: RequestLaunchTemplateDataTypeDef = {
        "ImageId": options.ami,
        "IamInstanceProfile": {"Arn": profile} if profile.startswith("arn:") else {"Name": profile},
        # A mapping with another device name would add a second volume and leave the root volume as it is.
        "BlockDeviceMappings": [_root_volume(options.volume, root)],
        # A machine can thereby terminate itself by powering off, without any IAM permission.
        "InstanceInitiatedShutdownBehavior": "terminate",
        "MetadataOptions": {
            "HttpEndpoint": "enabled",
            "HttpTokens": "required",
            "HttpProtocolIpv6": "disabled",
            # Containers cannot reach the metadata service.
            "HttpPutResponseHopLimit": 1,
            "InstanceMetadataTags": "enabled",
        },
        "UserData": base64.b64encode(compress(user_data)).decode(),
        # Only a template can tag them. IAM allows only network interfaces with the tag of the pool.
        "TagSpecifications": [
            {"ResourceType": "network-interface", "Tags": pool_tags(options.tags, pool)},
        ],
    }
    if options.security_groups:
        data["SecurityGroupIds"] = list(options.security_groups)
    if options.key_name:
        data["KeyName"] = options.key_name
    return data


def digest(data: RequestLaunchTemplateDataTypeDef) -> str:
    # Versions of zlib may compress the same text differently.
    user_data = gzip.decompress(base64.b64decode(data["UserData"])).decode()
    text = json.dumps({**data, "UserData": user_data}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_CHARS]


class LaunchTemplate:
    def __init__(self, *, calls: Ec2Calls, pool: str) -> None:
        self._calls = calls
        self._pool = pool
        self.name = template_name(pool)

    async def ensure(self, data: RequestLaunchTemplateDataTypeDef) -> list[str]:
        """Make this content the default version. Return the changes for people."""
        wanted = DESCRIPTION_PREFIX + digest(data)
        if await self._exists() or not await self._create(data, wanted):
            return await self._update(data, wanted)
        return [f"created launch template {self.name}"]

    async def is_current(self, data: RequestLaunchTemplateDataTypeDef) -> bool | None:
        """Whether the default version has this content; None if the template does not exist. Read-only."""
        if not await self._exists():
            return None
        return _is_default(await self._versions(), DESCRIPTION_PREFIX + digest(data))

    async def _versions(self) -> list[dict[str, Any]]:
        answer = await self._calls.call(
            "DescribeLaunchTemplateVersions", LaunchTemplateName=self.name, Versions=["$Default", "$Latest"]
        )
        versions: list[dict[str, Any]] = answer.get("LaunchTemplateVersions", [])
        return versions

    async def _exists(self) -> bool:
        try:
            answer = await self._calls.call(
                "DescribeLaunchTemplates", raw_codes=TEMPLATE_MISSING, LaunchTemplateNames=[self.name]
            )
        except ClientError:
            return False
        templates = answer.get("LaunchTemplates", [])
        if not templates:
            return False
        tags = {tag["Key"]: tag["Value"] for tag in templates[0].get("Tags", [])}
        if tags.get(POOL_TAG) != self._pool:
            raise UserError(
                f"launch template {self.name!r} exists but does not belong to this pool",
                field="pool",
                fix=f"choose another pool name, or tag the template with {POOL_TAG}={self._pool}",
            )
        return True

    async def _create(self, data: RequestLaunchTemplateDataTypeDef, wanted: str) -> bool:
        """Whether the template was created; False if another process created it first."""
        # The same as those of the network interfaces.
        tags = data["TagSpecifications"][0]["Tags"]
        try:
            await self._calls.call(
                "CreateLaunchTemplate",
                raw_codes=_ALREADY_EXISTS,
                ClientToken=self._calls.new_token(),
                LaunchTemplateName=self.name,
                VersionDescription=wanted,
                LaunchTemplateData=data,
                TagSpecifications=[{"ResourceType": "launch-template", "Tags": tags}],
            )
        except ClientError:
            return False
        return True

    async def _update(self, data: RequestLaunchTemplateDataTypeDef, wanted: str) -> list[str]:
        versions = await self._versions()
        if _is_default(versions, wanted):
            return []
        # The version exists if an earlier refresh was interrupted before it made the version the default.
        number = next((item["VersionNumber"] for item in versions if item.get("VersionDescription") == wanted), None)
        if number is None:
            created = await self._calls.call(
                "CreateLaunchTemplateVersion",
                ClientToken=self._calls.new_token(),
                LaunchTemplateName=self.name,
                VersionDescription=wanted,
                LaunchTemplateData=data,
            )
            number = created.get("LaunchTemplateVersion", {}).get("VersionNumber")
        if number is None:
            raise Unavailable(f"EC2 returned no version number of the new version of {self.name}")
        await self._calls.call("ModifyLaunchTemplate", LaunchTemplateName=self.name, DefaultVersion=str(number))
        return [f"launch template {self.name}: version {number} is the default"]


def _is_default(versions: list[dict[str, Any]], wanted: str) -> bool:
    return any(version.get("DefaultVersion") and version.get("VersionDescription") == wanted for version in versions)
