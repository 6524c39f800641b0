"""Keys of an instance's items, which contain the instance's AWS user id: `<role id>:<instance id>`.

An IAM policy can thereby restrict a machine to its own items (`${aws:userid}`). The role of an instance profile may be
replaced while instances run, so the table stores the ids of former roles too: new records use the newest role id, and
older records are looked up under the former ones.
"""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Protocol

from botocore.exceptions import ClientError

from remuda.adapters.aws.calls import ErrorCategory, category_of, code_of, translated
from remuda.adapters.aws.dynamodb import expressions, items
from remuda.adapters.aws.dynamodb.items import ItemKeys
from remuda.adapters.aws.dynamodb.table import ConditionFailed, Table, key_of
from remuda.adapters.aws.ec2.options import PROFILE, Ec2LaunchOptions
from remuda.domain.errors import Conflict, Unavailable, UserError
from remuda.domain.resources import MAX_SHOWN
from remuda.domain.serialization import to_document
from remuda.domain.timestamps import to_milliseconds
from remuda.ports.calls import CallCounter

if TYPE_CHECKING:
    from types_aiobotocore_iam import IAMClient
    from types_aiobotocore_sts import STSClient

#: Maximum age in seconds of the cached key prefixes. Less than the grace period of instances without a record.
CACHE_TTL_S = 60.0
#: Attempts to store a new prefix while other refreshes change the prefixes.
MAX_ATTEMPTS = 3
#: Maximum number of instances whose keys are cached.
MAX_CACHED = 10_000
_NO_SUCH_PROFILE = "NoSuchEntity"
_ROLE_ID = re.compile(r"[A-Z0-9]{16,128}")


# Role ids from IAM and STS -----------------------------------------------------------------------------------------


async def role_key_prefix(client: IAMClient, launch: Mapping[str, str], calls: CallCounter) -> str:
    """The key prefix of instances launched with these options: the id of the role in their instance profile."""
    name = profile_name(Ec2LaunchOptions.parse(launch).profile)
    with calls.counted("iam", "GetInstanceProfile"):
        role = await instance_profile_role(client, name)
    role_id = str(role.get("RoleId", ""))
    if not _ROLE_ID.fullmatch(role_id):
        raise Unavailable(f"IAM returned an invalid id of the role in {name}: {role_id[:MAX_SHOWN]!r}")
    return f"{role_id}:"


def profile_name(profile: str) -> str:
    """The name of an instance profile that is given by name or by ARN."""
    return profile.rpartition("/")[2]


async def instance_profile_role(client: IAMClient, name: str) -> Mapping[str, Any]:
    """The role in an instance profile."""
    try:
        with translated("IAM", name):
            answer = await _get_instance_profile(client, name)
    except UserError as error:
        error.field = error.field or PROFILE
        raise
    roles: list[Mapping[str, Any]] = answer["InstanceProfile"].get("Roles", [])
    if not roles:
        raise UserError(
            f"instance profile {name[:MAX_SHOWN]!r} has no role", field=PROFILE, fix="add the agent's role to it"
        )
    return roles[0]


async def _get_instance_profile(client: IAMClient, name: str) -> Any:
    try:
        return await client.get_instance_profile(InstanceProfileName=name)
    except ClientError as error:
        if code_of(error) == _NO_SUCH_PROFILE:
            raise UserError(
                f"instance profile {name[:MAX_SHOWN]!r} does not exist in this account",
                field=PROFILE,
                fix=f"create it (deploy/cloudformation.yml does), or correct {PROFILE}",
            ) from None
        if category_of(code_of(error)) is ErrorCategory.PERMISSION:
            raise UserError(
                f"the AWS credentials do not permit reading instance profile {name[:MAX_SHOWN]!r}",
                field=PROFILE,
                fix="grant iam:GetInstanceProfile on it to the role that runs remuda refresh",
            ) from None
        raise


async def own_key_prefix(client: STSClient, instance_id: str) -> str:
    """The key prefix of the machine that this process runs on, taken from the client's credentials."""
    with translated("STS", "the machine's identity"):
        answer = await client.get_caller_identity()
    user_id = str(answer.get("UserId", ""))
    if not _ROLE_ID.fullmatch(user_id.removesuffix(f":{instance_id}")) or ":" not in user_id:
        raise UserError(
            f"the AWS credentials belong to {user_id[:MAX_SHOWN]!r}, not to instance {instance_id}",
            fix="let the agent use the role of its instance: configure no other credentials",
        )
    return user_id.removesuffix(instance_id)


# Keys of instances -------------------------------------------------------------------------------------------------


class InstanceKeys(Protocol):
    async def fetch(self) -> None:
        """Fetch the newest prefix from AWS. Called before the table is changed, so that a failure changes nothing."""
        ...

    async def store(self) -> Sequence[str]:
        """Store the fetched prefix in the table. Return the changes for people."""
        ...

    async def of(self, instance_ids: Collection[str]) -> Mapping[str, ItemKeys]: ...


class FixedKeys:
    """Keys with a known prefix, for agents."""

    def __init__(self, prefix: str) -> None:
        self._keys = ItemKeys(prefix=prefix)

    async def fetch(self) -> None:
        return

    async def store(self) -> Sequence[str]:
        return []

    async def of(self, instance_ids: Collection[str]) -> Mapping[str, ItemKeys]:
        return dict.fromkeys(instance_ids, self._keys)


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownPrefix:
    prefix: str
    since: datetime


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownPrefixes:
    """All prefixes in use, newest first."""

    prefixes: tuple[KnownPrefix, ...] = ()


class StoredKeys:
    """Keys with the prefixes stored in the table, for the control plane. Only `fetch` calls AWS (`newest`)."""

    def __init__(self, *, table: Table, newest: Callable[[], Awaitable[str]]) -> None:
        self._table = table
        self._newest = newest
        self._fetched = ""
        self._known: KnownPrefixes | None = None
        self._read_at = 0.0
        self._reading = asyncio.Lock()
        self._located: OrderedDict[str, ItemKeys] = OrderedDict()

    async def fetch(self) -> None:
        self._fetched = await self._newest()

    async def store(self) -> Sequence[str]:
        prefix = self._fetched
        for _ in range(MAX_ATTEMPTS):
            before = await self._read()
            if before is not None and before.prefixes[0].prefix == prefix:
                self._cache(before)
                return []
            after = self._with(prefix, before)
            condition = (
                expressions.if_absent()
                if before is None
                else expressions.if_equal("prefixes", to_document(before)["prefixes"])
            )
            try:
                await self._table.put(items.document_item(items.PREFIXES, after), condition)
            except ConditionFailed:
                continue
            self._cache(after)
            return [f"keys of records begin with {prefix}"]
        raise Conflict("other processes keep changing the key prefixes; is another refresh running?")

    async def of(self, instance_ids: Collection[str]) -> Mapping[str, ItemKeys]:
        known = await self._fresh()
        candidates = [ItemKeys(prefix=each.prefix) for each in known.prefixes]
        if len(candidates) == 1:
            return dict.fromkeys(instance_ids, candidates[0])
        await self._locate([name for name in instance_ids if name not in self._located], candidates)
        return {name: self._located.get(name, candidates[0]) for name in instance_ids}

    async def _locate(self, instance_ids: Sequence[str], candidates: Sequence[ItemKeys]) -> None:
        """Find the keys of existing records. Instances without a record are not cached."""
        if not instance_ids:
            return
        wanted = {key_of(keys.control(name)): (name, keys) for keys in reversed(candidates) for name in instance_ids}
        found = {key_of(item) for item in await self._table.get_all([items.key(*place) for place in wanted])}
        # The newest prefix comes last and wins.
        self._located.update(wanted[place] for place in wanted if place in found)
        while len(self._located) > MAX_CACHED:
            self._located.popitem(last=False)

    async def _fresh(self) -> KnownPrefixes:
        async with self._reading:
            if self._known is None or self._table.clock.monotonic() - self._read_at >= CACHE_TTL_S:
                known = await self._read()
                if known is None:
                    raise UserError(
                        f"table {self._table.name} does not contain the id of the instances' role",
                        fix="run remuda refresh",
                    )
                self._cache(known)
            assert self._known is not None  # noqa: S101 - cached just now
            return self._known

    async def _read(self) -> KnownPrefixes | None:
        item = await self._table.get(items.PREFIXES)
        if item is None:
            return None
        try:
            known = items.record_of(KnownPrefixes, item)
            if not known.prefixes:
                raise ValueError("the list is empty")  # noqa: TRY301 - handled like any unreadable item
        except ValueError as error:
            raise Unavailable(f"the key prefixes in table {self._table.name} cannot be read: {error}") from error
        return known

    def _with(self, prefix: str, before: KnownPrefixes | None) -> KnownPrefixes:
        """`prefix`, and the former prefixes under which records may still exist."""
        now = self._table.clock.now()
        kept: list[KnownPrefix] = []
        successor = now
        for each in before.prefixes if before else ():
            if each.prefix != prefix and now - successor < items.DEFAULT_RETENTION:
                kept.append(each)
            successor = each.since
        return KnownPrefixes(prefixes=(KnownPrefix(prefix=prefix, since=to_milliseconds(now)), *kept))

    def _cache(self, known: KnownPrefixes) -> None:
        self._known = known
        self._read_at = self._table.clock.monotonic()
