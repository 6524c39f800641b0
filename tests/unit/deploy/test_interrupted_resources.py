"""Each resource of `deploy` interrupted at each of its calls, and each of its calls sent twice by botocore.

The next run must end with the same resources as one that was never interrupted. A call is sent twice if its first
answer was lost: AWS then refuses a creation, unless it recognises the token of the request.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from enum import Enum
from typing import Any

import pytest
from botocore.exceptions import ClientError

from remuda.adapters.aws.calls import code_of, translate
from remuda.deployment.api import AwsAccount
from remuda.deployment.resources import AUDIENCE, Bucket, CredentialSecret, OidcProvider, SecurityGroup, SpotRole
from remuda.domain.errors import UserError
from tests.support.aws.scripted_api import check_api_request

ACCOUNT = AwsAccount(
    account_id="123456789012", partition="aws", region="eu-central-1", caller="arn:aws:iam::123456789012:user/x"
)
POOL, VPC = "ci", "vpc-0123456789abcdef0"
TAGS = {"team": "builds"}
ISSUER = "https://token.actions.githubusercontent.com"
#: More than any resource needs.
MAX_CALLS = 20


class CallCut(Enum):
    BEFORE = "ended before the call"
    AFTER = "ended after the call"
    TWICE = "sent again, because the answer was lost"


class DeployEnded(Exception):
    """The process has ended."""


def refused(operation: str, code: str) -> ClientError:
    return ClientError({"Error": {"Code": code, "Message": "no"}}, operation)


class MemoryAccount:
    """The resources of an account, as far as `deploy` sees them. Stands in for `AwsApi`."""

    def __init__(self, at: int = 0, kind: CallCut = CallCut.BEFORE) -> None:
        self._at = at
        self._kind = kind
        self.calls: list[str] = []
        #: Properties by resource.
        self.resources: dict[str, dict[str, Any]] = {}

    async def call(self, service: str, operation: str, **parameters: Any) -> Any:
        try:
            return self._make(service, operation, parameters)
        except ClientError as error:
            raise translate(error, service, operation) from error

    async def find(self, service: str, operation: str, missing: Collection[str], **parameters: Any) -> Any:
        try:
            return self._make(service, operation, parameters)
        except ClientError as error:
            if code_of(error) in missing:
                return None
            raise translate(error, service, operation) from error

    def _make(self, service: str, operation: str, parameters: dict[str, Any]) -> Any:
        check_api_request(service, operation, parameters)
        self.calls.append(operation)
        is_cut = len(self.calls) == self._at
        if is_cut and self._kind is CallCut.BEFORE:
            raise DeployEnded
        answer = self._answer(operation, parameters)
        if is_cut and self._kind is CallCut.AFTER:
            raise DeployEnded
        if is_cut:
            answer = self._answer(operation, parameters)
        return answer

    def _answer(self, operation: str, given: dict[str, Any]) -> Any:  # noqa: C901, PLR0912  # one case each
        match operation:
            case "HeadBucket" | "ListObjectsV2":
                self._property("bucket", "name", operation, "404")
                return {"KeyCount": 0}
            case "CreateBucket":
                self._create("bucket", operation, "BucketAlreadyOwnedByYou", name=given["Bucket"])
                return {}
            case "GetBucketTagging":
                return self._property("bucket", "Tagging", operation, "NoSuchTagSet")
            case "PutPublicAccessBlock" | "PutBucketEncryption" | "PutBucketPolicy" | "PutBucketTagging":
                name = next(name for name in given if name not in {"Bucket", "ExpectedBucketOwner"})
                self.resources["bucket"][name] = given[name]
                return {}
            case "DescribeSecret":
                return self._property("secret", "description", operation, "ResourceNotFoundException")
            case "CreateSecret":
                # botocore adds a token, with which the second request is recognised.
                self.resources["secret"] = {
                    "description": {"ARN": "arn:secret", "Tags": given["Tags"]},
                    "value": {"SecretString": given["SecretString"]},
                }
                return {"ARN": "arn:secret"}
            case "GetSecretValue":
                return self._property("secret", "value", operation, "ResourceNotFoundException")
            case "RestoreSecret":
                self.resources["secret"]["description"].pop("DeletedDate")
                return {}
            case "PutSecretValue":
                self.resources["secret"]["value"] = {"SecretString": given["SecretString"]}
                return {}
            case "GetOpenIDConnectProvider":
                return self._property("provider", "description", operation, "NoSuchEntity")
            case "CreateOpenIDConnectProvider":
                made = {"ClientIDList": given["ClientIDList"], "Tags": given["Tags"]}
                self._create("provider", operation, "EntityAlreadyExists", description=made)
                return {}
            case "AddClientIDToOpenIDConnectProvider":
                known = self.resources["provider"]["description"]["ClientIDList"]
                known[:] = dict.fromkeys([*known, given["ClientID"]])
                return {}
            case "DescribeSecurityGroups":
                return {"SecurityGroups": list(self.resources.get("group", {}).values())}
            case "CreateSecurityGroup":
                (tags,) = given["TagSpecifications"]
                made = {"GroupId": "sg-1", "Tags": tags["Tags"]}
                self._create("group", operation, "InvalidGroup.Duplicate", description=made)
                return {"GroupId": "sg-1"}
            case "GetRole":
                return self._property("role", "name", operation, "NoSuchEntity")
            case "CreateServiceLinkedRole":
                self._create("role", operation, "InvalidInput", name=given["AWSServiceName"])
                return {}
        raise NotImplementedError(operation)

    def _create(self, resource: str, operation: str, refusal: str, **properties: Any) -> None:
        if resource in self.resources:
            raise refused(operation, refusal)
        self.resources[resource] = properties

    def _property(self, resource: str, name: str, operation: str, refusal: str) -> Any:
        found = self.resources.get(resource, {}).get(name)
        if found is None:
            raise refused(operation, refusal)
        return found


Ensure = Callable[[Any], Awaitable[object]]
RESOURCES: dict[str, Ensure] = {
    "bucket": lambda api: Bucket(api, POOL, ACCOUNT).ensure(TAGS),
    "secret": lambda api: CredentialSecret(api, POOL).ensure("github_pat_1", TAGS),
    "provider": lambda api: OidcProvider(api, ACCOUNT, ISSUER).ensure(POOL, TAGS),
    "group": lambda api: SecurityGroup(api, POOL).ensure(VPC, TAGS),
    "spot role": lambda api: SpotRole(api).ensure(),
}


async def completed(ensure: Ensure) -> MemoryAccount:
    account = MemoryAccount()
    await ensure(account)
    return account


@pytest.mark.parametrize("kind", CallCut)
@pytest.mark.parametrize("name", RESOURCES)
async def test_a_resource_interrupted_at_each_call(name: str, kind: CallCut) -> None:
    ensure = RESOURCES[name]
    expected = await completed(ensure)
    for at in range(1, MAX_CALLS):
        account = MemoryAccount(at, kind)
        try:
            await ensure(account)
        except DeployEnded:
            await ensure(account)
        assert account.resources == expected.resources, f"{kind.value}: {account.calls[at - 1]}"
        if len(account.calls) < at:
            break
    else:
        pytest.fail("the resource makes more calls than MAX_CALLS")


@pytest.mark.parametrize("name", RESOURCES)
async def test_a_complete_resource_is_left_alone(name: str) -> None:
    account = await completed(RESOURCES[name])
    before = len(account.calls)
    await RESOURCES[name](account)
    assert not [each for each in account.calls[before:] if not each.startswith(("Get", "Head", "Describe", "List"))]


async def test_a_secret_that_is_scheduled_for_deletion_is_restored_at_each_call() -> None:
    for at in range(1, MAX_CALLS):
        account = await completed(RESOURCES["secret"])
        account.resources["secret"]["description"]["DeletedDate"] = "2026-01-01"
        cut = MemoryAccount(at, CallCut.AFTER)
        cut.resources = account.resources
        ensure: Ensure = lambda api: CredentialSecret(api, POOL).ensure("github_pat_2", TAGS)  # noqa: E731
        try:
            await ensure(cut)
        except DeployEnded:
            await ensure(cut)
        assert "DeletedDate" not in cut.resources["secret"]["description"]
        assert cut.resources["secret"]["value"] == {"SecretString": "github_pat_2"}
        if len(cut.calls) < at:
            return
    pytest.fail("it makes more calls than MAX_CALLS")


async def test_the_audience_is_added_to_a_provider_of_the_account() -> None:
    account: Any = MemoryAccount()
    account.resources["provider"] = {"description": {"ClientIDList": ["other"], "Tags": []}}
    assert await OidcProvider(account, ACCOUNT, ISSUER).ensure(POOL, TAGS) == f"audience {AUDIENCE} added"
    assert account.resources["provider"]["description"]["ClientIDList"] == ["other", AUDIENCE]


async def test_the_group_of_somebody_else_is_not_used() -> None:
    account = MemoryAccount()
    account.resources["group"] = {"description": {"GroupId": "sg-2", "Tags": []}}
    with pytest.raises(UserError, match="does not have the tag"):
        await RESOURCES["group"](account)
