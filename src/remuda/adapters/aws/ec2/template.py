"""The launch template, by content: a new version only where something changed."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import TYPE_CHECKING, Any

from botocore.exceptions import ClientError

from remuda.adapters.aws.ec2.calls import Ec2Calls
from remuda.adapters.aws.ec2.options import Options
from remuda.domain.errors import Unavailable, UserError
from remuda.ports.compute import POOL_TAG

if TYPE_CHECKING:
    from types_aiobotocore_ec2.type_defs import RequestLaunchTemplateDataTypeDef

#: Begins the description of each version that we made; the digest of its content follows.
MARK = "remuda "
#: Of the digest: enough never to meet twice, short enough to read.
DIGEST_CHARS = 32
_ALREADY_THERE = frozenset({"InvalidLaunchTemplateName.AlreadyExistsException"})
_UNKNOWN = frozenset({"InvalidLaunchTemplateName.NotFoundException", "InvalidLaunchTemplateId.NotFound"})


def template_name(pool: str) -> str:
    return f"remuda-{pool}"


def template_data(options: Options, user_data: str) -> RequestLaunchTemplateDataTypeDef:
    profile = options.profile
    data: RequestLaunchTemplateDataTypeDef = {
        "ImageId": options.ami,
        "IamInstanceProfile": {"Arn": profile} if profile.startswith("arn:") else {"Name": profile},
        # The machine ends itself without any right: it powers off.
        "InstanceInitiatedShutdownBehavior": "terminate",
        "MetadataOptions": {
            "HttpEndpoint": "enabled",
            "HttpTokens": "required",
            "HttpProtocolIpv6": "disabled",
            # Not from inside a container.
            "HttpPutResponseHopLimit": 1,
            "InstanceMetadataTags": "enabled",
        },
        "UserData": base64.b64encode(user_data.encode()).decode(),
    }
    if options.security_groups:
        data["SecurityGroupIds"] = list(options.security_groups)
    if options.key_name:
        data["KeyName"] = options.key_name
    return data


def digest(data: RequestLaunchTemplateDataTypeDef) -> str:
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_CHARS]


class LaunchTemplate:
    def __init__(self, *, calls: Ec2Calls, pool: str) -> None:
        self._calls = calls
        self._pool = pool
        self.name = template_name(pool)

    async def ensure(self, data: RequestLaunchTemplateDataTypeDef) -> list[str]:
        """Make this the default. Returns what changed."""
        wanted = MARK + digest(data)
        if await self._exists() or not await self._create(data, wanted):
            return await self._update(data, wanted)
        return [f"created launch template {self.name}"]

    async def is_current(self, data: RequestLaunchTemplateDataTypeDef) -> bool | None:
        """Whether `ensure` would leave it as it is; None where there is none. Nothing is changed."""
        if not await self._exists():
            return None
        return _is_default(await self._versions(), MARK + digest(data))

    async def _versions(self) -> list[dict[str, Any]]:
        answer = await self._calls.ask(
            "DescribeLaunchTemplateVersions", LaunchTemplateName=self.name, Versions=["$Default", "$Latest"]
        )
        versions: list[dict[str, Any]] = answer.get("LaunchTemplateVersions", [])
        return versions

    async def _exists(self) -> bool:
        try:
            answer = await self._calls.ask("DescribeLaunchTemplates", passes=_UNKNOWN, LaunchTemplateNames=[self.name])
        except ClientError:
            return False
        templates = answer.get("LaunchTemplates", [])
        if not templates:
            return False
        tags = {tag["Key"]: tag["Value"] for tag in templates[0].get("Tags", [])}
        if tags.get(POOL_TAG) != self._pool:
            raise UserError(
                f"there is a launch template {self.name!r} that is not this pool's",
                field="pool",
                fix=f"choose another name for the pool, or tag the template {POOL_TAG}={self._pool}",
            )
        return True

    async def _create(self, data: RequestLaunchTemplateDataTypeDef, wanted: str) -> bool:
        """Whether it was made; False where another refresh was first."""
        tags = [{"Key": POOL_TAG, "Value": self._pool}]
        try:
            await self._calls.ask(
                "CreateLaunchTemplate",
                passes=_ALREADY_THERE,
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
        # A refresh that was cut after it had made the version, before it was the default.
        number = next((item["VersionNumber"] for item in versions if item.get("VersionDescription") == wanted), None)
        if number is None:
            made = await self._calls.ask(
                "CreateLaunchTemplateVersion",
                LaunchTemplateName=self.name,
                VersionDescription=wanted,
                LaunchTemplateData=data,
            )
            number = made.get("LaunchTemplateVersion", {}).get("VersionNumber")
        if number is None:
            raise Unavailable(f"EC2 does not say which version of {self.name} it made")
        await self._calls.ask("ModifyLaunchTemplate", LaunchTemplateName=self.name, DefaultVersion=str(number))
        return [f"launch template {self.name}: version {number} is the default"]


def _is_default(versions: list[dict[str, Any]], wanted: str) -> bool:
    return any(version.get("DefaultVersion") and version.get("VersionDescription") == wanted for version in versions)
