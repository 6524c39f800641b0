"""Resources outside the stack: bucket, secret, OIDC provider and security group; and data that may outlive it.

The stack needs the first three before it exists. Each has a tag with the name of the pool, which says that `deploy`
created it. Every `ensure` completes what an interrupted run has left, and changes nothing if there is nothing to do.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from botocore.exceptions import ClientError

from remuda.adapters.aws.account import SPOT_ROLE_NAME
from remuda.adapters.aws.calls import code_of
from remuda.adapters.aws.ec2.template import pool_tags
from remuda.config.settings import GITHUB_ISSUER
from remuda.deployment.api import AwsAccount, AwsApi, tags_of
from remuda.deployment.statements import VERSION
from remuda.domain.errors import RemudaError, Unavailable, UserError
from remuda.ports.compute import POOL_TAG

AUDIENCE = "sts.amazonaws.com"
#: The code of Secrets Manager, DynamoDB and CloudWatch Logs.
_MISSING = frozenset({"ResourceNotFoundException"})
_NO_ENTITY = frozenset({"NoSuchEntity", "NoSuchEntityException"})
_ENTITY_EXISTS = frozenset({"EntityAlreadyExists", "EntityAlreadyExistsException"})
_NO_OBJECT = frozenset({"404", "NoSuchKey", "NotFound"})
_NO_BUCKET = frozenset({"404", "NoSuchBucket", "NotFound"})
_FORBIDDEN = frozenset({"403", "AccessDenied", "Forbidden"})
#: Objects per call of DeleteObjects, S3's limit.
_DELETE_BATCH = 1_000


def stack_name(pool: str) -> str:
    return f"remuda-{pool}"


def secret_name(pool: str) -> str:
    return f"remuda/{pool}/github"


def issuer_of(api_url: str) -> str:
    """The issuer of GitHub's OIDC tokens, from the URL of its API.

    Sources: GitHub docs, "OpenID Connect reference" (github.com), "About security hardening with OpenID Connect" of
    GitHub Enterprise Server (https://HOST/_services/token) and of ghe.com (https://token.actions.SUBDOMAIN.ghe.com).
    """
    base = api_url.rstrip("/")
    if not base or base == "https://api.github.com":
        return GITHUB_ISSUER
    if base.startswith("https://api.") and base.endswith(".ghe.com"):
        return f"https://token.actions.{base.removeprefix('https://api.')}"
    return f"{base.removesuffix('/api/v3')}/_services/token"


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundResource:
    """A resource that exists."""

    identifier: str
    #: Whether `deploy` created it.
    is_ours: bool
    #: Why it cannot be used, or empty.
    problem: str = ""


class Bucket:
    """The bucket of the bundles and the template.

    Its tags are set last: a bucket with the tag of the pool is complete.
    """

    def __init__(self, api: AwsApi, pool: str, account: AwsAccount) -> None:
        self._api = api
        self._pool = pool
        self._account = account
        self.name = self.name_of(pool, account)
        #: The bucket in calls. Names are global: another account may have taken that of a deleted bucket.
        self._target: dict[str, Any] = {"Bucket": self.name, "ExpectedBucketOwner": account.account_id}

    @staticmethod
    def name_of(pool: str, account: AwsAccount) -> str:
        return f"remuda-{pool}-{account.account_id}-{account.region}"

    async def find(self) -> FoundResource | None:
        try:
            if await self._api.find("s3", "HeadBucket", _NO_BUCKET, **self._target) is None:
                return None
        except RemudaError as error:
            cause = error.__cause__
            if isinstance(cause, ClientError) and code_of(cause) in _FORBIDDEN:
                return FoundResource(
                    identifier=self.name, is_ours=False, problem="it belongs to another account, or access is denied"
                )
            raise
        answer = await self._api.find("s3", "GetBucketTagging", {"NoSuchTagSet"}, **self._target)
        if tags_of((answer or {}).get("TagSet")).get(POOL_TAG) == self._pool:
            return FoundResource(identifier=self.name, is_ours=True)
        objects = await self._api.call("s3", "ListObjectsV2", **self._target, MaxKeys=1)
        # An empty bucket is what an interrupted run leaves.
        problem = f"it has objects, but not the tag {POOL_TAG}={self._pool}" if objects.get("KeyCount") else ""
        return FoundResource(identifier=self.name, is_ours=False, problem=problem)

    async def ensure(self, tags: Mapping[str, str]) -> bool:
        """Whether it was created or completed. `tags` are those of the user."""
        found = await self.find()
        if found is not None and found.is_ours:
            return False
        if found is not None and found.problem:
            raise UserError(f"bucket {self.name} cannot be used: {found.problem}", field="--pool")
        if found is None:
            place = {"LocationConstraint": self._account.region}
            # S3 rejects the name of its first region as a constraint.
            more = {} if self._account.region == "us-east-1" else {"CreateBucketConfiguration": place}
            await self._api.find("s3", "CreateBucket", {"BucketAlreadyOwnedByYou"}, Bucket=self.name, **more)
        blocked = dict.fromkeys(
            ("BlockPublicAcls", "IgnorePublicAcls", "BlockPublicPolicy", "RestrictPublicBuckets"), True
        )
        await self._api.call("s3", "PutPublicAccessBlock", **self._target, PublicAccessBlockConfiguration=blocked)
        rules = [{"ApplyServerSideEncryptionByDefault": {"SSEAlgorithm": "AES256"}}]
        await self._api.call(
            "s3", "PutBucketEncryption", **self._target, ServerSideEncryptionConfiguration={"Rules": rules}
        )
        await self._api.call("s3", "PutBucketPolicy", **self._target, Policy=json.dumps(self._policy()))
        tag_set = pool_tags(tags, self._pool)
        await self._api.call("s3", "PutBucketTagging", **self._target, Tagging={"TagSet": tag_set})
        return True

    def _policy(self) -> dict[str, Any]:
        arn = f"arn:{self._account.partition}:s3:::{self.name}"
        return {
            "Version": VERSION,
            "Statement": [
                {
                    "Sid": "RequireTls",
                    "Effect": "Deny",
                    "Principal": "*",
                    "Action": "s3:*",
                    "Resource": [arn, f"{arn}/*"],
                    "Condition": {"Bool": {"aws:SecureTransport": "false"}},
                }
            ],
        }

    async def has(self, key: str) -> bool:
        return await self._api.find("s3", "HeadObject", _NO_OBJECT, **self._target, Key=key) is not None

    async def upload(self, key: str, content: bytes | Callable[[], Awaitable[bytes]]) -> bool:
        """Store the content under a key that contains its digest. Whether it was not there yet."""
        if await self.has(key):
            return False
        if not isinstance(content, bytes):
            content = await content()
        digest = base64.b64encode(hashlib.sha256(content).digest()).decode()
        # S3 refuses content with another digest, so an object under the key is complete.
        await self._api.call("s3", "PutObject", **self._target, Key=key, Body=content, ChecksumSHA256=digest)
        return True

    async def remove(self, key: str) -> None:
        await self._api.call("s3", "DeleteObject", **self._target, Key=key)

    async def address(self, key: str) -> str:
        """The address of an object for CloudFormation, with the bucket in its path."""
        return f"{await self._api.endpoint('s3')}/{self.name}/{key}"

    async def keys(self) -> list[dict[str, str]]:
        """All objects with their versions. Versioning is off, but someone may have enabled it."""
        found = []
        for kind in ("Versions", "DeleteMarkers"):
            async for item in self._api.items("s3", "ListObjectVersions", kind, **self._target):
                version = str(item.get("VersionId") or "")
                found.append({"Key": str(item["Key"]), **({"VersionId": version} if version else {})})
        return found

    async def delete(self) -> None:
        keys = await self.keys()
        for start in range(0, len(keys), _DELETE_BATCH):
            batch = {"Objects": keys[start : start + _DELETE_BATCH], "Quiet": True}
            answer = await self._api.call("s3", "DeleteObjects", **self._target, Delete=batch)
            for failed in answer.get("Errors") or ():
                raise Unavailable(f"S3 does not delete {failed.get('Key')}: {failed.get('Message')}")
        await self._api.find("s3", "DeleteBucket", _NO_BUCKET, **self._target)


class CredentialSecret:
    """The secret with the GitHub credential."""

    def __init__(self, api: AwsApi, pool: str) -> None:
        self._api = api
        self._pool = pool
        self.name = secret_name(pool)

    async def find(self) -> FoundResource | None:
        answer = await self._api.find("secretsmanager", "DescribeSecret", _MISSING, SecretId=self.name)
        if answer is None:
            return None
        is_ours = tags_of(answer.get("Tags")).get(POOL_TAG) == self._pool
        return FoundResource(
            identifier=str(answer["ARN"]),
            is_ours=is_ours,
            problem="it is scheduled for deletion" if answer.get("DeletedDate") else "",
        )

    async def ensure(self, text: str | None, tags: Mapping[str, str]) -> tuple[str, str]:
        """Store the credential, or keep the stored one. Returns the ARN, and what was done or an empty text."""
        found = await self.find()
        if found is None:
            if text is None:
                raise UserError(f"secret {self.name} does not exist", field="REMUDA_GITHUB_TOKEN", fix="set it")
            made = await self._api.call(
                "secretsmanager",
                "CreateSecret",
                Name=self.name,
                Description="GitHub credential of a Remuda pool, made by remuda deploy.",
                SecretString=text,
                Tags=pool_tags(tags, self._pool),
            )
            return str(made["ARN"]), "created"
        done = ""
        if found.problem:
            await self._api.call("secretsmanager", "RestoreSecret", SecretId=self.name)
            done = "restored"
        if text is not None and await self._value() != text:
            await self._api.call("secretsmanager", "PutSecretValue", SecretId=self.name, SecretString=text)
            done = "updated"
        return found.identifier, done

    async def _value(self) -> str:
        # A secret without a value answers as if it did not exist.
        answer = await self._api.find("secretsmanager", "GetSecretValue", _MISSING, SecretId=self.name)
        return str((answer or {}).get("SecretString", ""))

    async def delete(self) -> None:
        await self._api.find(
            "secretsmanager", "DeleteSecret", _MISSING, SecretId=self.name, ForceDeleteWithoutRecovery=True
        )


class OidcProvider:
    """GitHub as an identity provider of the account. All pools and other software of the account share it."""

    def __init__(self, api: AwsApi, account: AwsAccount, issuer: str) -> None:
        self._api = api
        self._issuer = issuer
        self.arn = self.arn_of(account, issuer)

    @staticmethod
    def arn_of(account: AwsAccount, issuer: str) -> str:
        host = issuer.partition("://")[2]
        return f"arn:{account.partition}:iam::{account.account_id}:oidc-provider/{host}"

    async def find(self) -> FoundResource | None:
        answer = await self._get()
        if answer is None:
            return None
        return FoundResource(identifier=self.arn, is_ours=POOL_TAG in tags_of(answer.get("Tags")))

    async def _get(self) -> dict[str, Any] | None:
        return await self._api.find("iam", "GetOpenIDConnectProvider", _NO_ENTITY, OpenIDConnectProviderArn=self.arn)

    async def owner(self) -> str:
        """The pool whose deployment created it; empty if something else did."""
        return tags_of(((await self._get()) or {}).get("Tags")).get(POOL_TAG, "")

    async def ensure(self, pool: str, tags: Mapping[str, str]) -> str:
        """Create the provider, or add the audience to it. Returns what was done, or an empty text."""
        found = await self._get()
        if found is None:
            # It exists if the answer was lost and botocore has sent the request again.
            await self._api.find(
                "iam",
                "CreateOpenIDConnectProvider",
                _ENTITY_EXISTS,
                Url=self._issuer,
                ClientIDList=[AUDIENCE],
                Tags=pool_tags(tags, pool),
            )
            return "created"
        if AUDIENCE in (found.get("ClientIDList") or ()):
            return ""
        await self._api.call(
            "iam", "AddClientIDToOpenIDConnectProvider", OpenIDConnectProviderArn=self.arn, ClientID=AUDIENCE
        )
        return f"audience {AUDIENCE} added"

    async def users(self) -> list[str]:
        """Names of the roles that trust it."""
        roles = self._api.items("iam", "ListRoles", "Roles")
        return [str(role["RoleName"]) async for role in roles if self.arn in json.dumps(_trust_policy(role))]

    async def delete(self) -> None:
        await self._api.find("iam", "DeleteOpenIDConnectProvider", _NO_ENTITY, OpenIDConnectProviderArn=self.arn)


def _trust_policy(role: dict[str, Any]) -> Any:
    return role.get("AssumeRolePolicyDocument") or {}


class SecurityGroup:
    """The group of the machines: everything outbound, nothing inbound."""

    def __init__(self, api: AwsApi, pool: str) -> None:
        self._api = api
        self._pool = pool
        self.name = stack_name(pool)

    async def find(self, vpc: str) -> FoundResource | None:
        """The group of this name in the VPC."""
        return next(iter(await self._find({"Name": "vpc-id", "Values": [vpc]})), None)

    async def find_all(self) -> list[FoundResource]:
        """The pool's groups. A pool that was moved has one per VPC."""
        return await self._find({"Name": f"tag:{POOL_TAG}", "Values": [self._pool]})

    async def _find(self, *more: dict[str, Any]) -> list[FoundResource]:
        filters = [{"Name": "group-name", "Values": [self.name]}, *more]
        answer = await self._api.call("ec2", "DescribeSecurityGroups", Filters=filters)
        found = []
        for group in answer.get("SecurityGroups", ()):
            is_ours = tags_of(group.get("Tags")).get(POOL_TAG) == self._pool
            problem = "" if is_ours else f"it does not have the tag {POOL_TAG}={self._pool}"
            found.append(FoundResource(identifier=str(group["GroupId"]), is_ours=is_ours, problem=problem))
        return found

    async def ensure(self, vpc: str, tags: Mapping[str, str]) -> tuple[str, bool]:
        """Its id, and whether it was created."""
        found = await self.find(vpc)
        if found is not None:
            if found.problem:
                raise UserError(
                    f"security group {self.name} ({found.identifier}) cannot be used: {found.problem}",
                    field="--security-group-ids",
                    fix="name the security groups of the machines, or choose another pool name",
                )
            return found.identifier, False
        made = await self._api.find(
            "ec2",
            "CreateSecurityGroup",
            {"InvalidGroup.Duplicate"},
            GroupName=self.name,
            Description=f"Machines of the Remuda pool {self._pool}",
            VpcId=vpc,
            TagSpecifications=[{"ResourceType": "security-group", "Tags": pool_tags(tags, self._pool)}],
        )
        if made is not None:
            return str(made["GroupId"]), True
        # Made by a request whose answer was lost, or by another deployment.
        found = await self.find(vpc)
        if found is None or found.problem:
            raise Unavailable(f"EC2 says that security group {self.name} exists, but does not list it")
        return found.identifier, True

    async def delete(self, group_id: str) -> bool:
        """Whether it is gone. EC2 refuses as long as a network interface uses it."""
        answer = await self._api.find("ec2", "DeleteSecurityGroup", {"DependencyViolation"}, GroupId=group_id)
        return answer is not None


class SpotRole:
    """The service-linked role of spot instances. Roles of Remuda may not create it, so the first launch would fail."""

    name = SPOT_ROLE_NAME

    def __init__(self, api: AwsApi) -> None:
        self._api = api

    async def exists(self) -> bool:
        return await self._api.find("iam", "GetRole", _NO_ENTITY, RoleName=self.name) is not None

    async def ensure(self) -> bool:
        """Whether it was created."""
        if await self.exists():
            return False
        # IAM answers with InvalidInput if another process was faster.
        made = await self._api.find(
            "iam",
            "CreateServiceLinkedRole",
            {"InvalidInput", "InvalidInputException", "EntityAlreadyExists"},
            AWSServiceName="spot.amazonaws.com",
        )
        return made is not None


class PoolTable:
    """The table, which is part of the stack or what `destroy --keep-data` has kept of it."""

    def __init__(self, api: AwsApi, pool: str) -> None:
        self._api = api
        self._pool = pool
        self.name = stack_name(pool)

    async def exists(self) -> bool:
        return await self._describe() is not None

    async def is_ours(self) -> bool | None:
        """Whether it has the tag of the pool. None if there is no table."""
        found = await self._describe()
        if found is None:
            return None
        # DynamoDB denies access to the tags of a table that does not exist.
        tags = await self._api.call("dynamodb", "ListTagsOfResource", ResourceArn=found["Table"]["TableArn"])
        return tags_of(tags.get("Tags")).get(POOL_TAG) == self._pool

    async def _describe(self) -> dict[str, Any] | None:
        return await self._api.find("dynamodb", "DescribeTable", _MISSING, TableName=self.name)

    async def delete(self) -> None:
        await self._api.find("dynamodb", "DeleteTable", _MISSING, TableName=self.name)


class LogGroups:
    """The log groups of the functions."""

    def __init__(self, api: AwsApi, pool: str) -> None:
        self._api = api
        self._prefix = f"/remuda/{pool}/"

    async def names(self) -> list[str]:
        groups = self._api.items("logs", "DescribeLogGroups", "logGroups", logGroupNamePrefix=self._prefix)
        return [str(item["logGroupName"]) async for item in groups]

    async def delete(self, name: str) -> None:
        await self._api.find("logs", "DeleteLogGroup", _MISSING, logGroupName=name)
