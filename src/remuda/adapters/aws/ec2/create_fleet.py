"""One CreateFleet: what is asked, and what the answer means. No call is made here."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from remuda.adapters.aws.ec2.options import Options
from remuda.adapters.aws.errors import (
    CAPACITY_FIX,
    LAUNCH_FIX,
    MAX_SAID,
    PERMISSION_FIX,
    QUOTA_FIX,
    RETRY_AFTER_S,
    Kind,
    kind_of,
)
from remuda.adapters.aws.tags import (
    FIRST_LIFE_TAG,
    GHR_APPLICATION,
    GHR_APPLICATION_TAG,
    GHR_ENVIRONMENT_TAG,
    GHR_OWNER_TAG,
    GHR_TYPE_TAG,
    MARGIN_TAG,
)
from remuda.domain.errors import CapacityError, RemudaError, Throttled, UserError
from remuda.domain.resources import RunnerRequest, UsageClass
from remuda.ports.compute import POOL_TAG, PROVISION_TAG, Launched, LaunchRequest

#: EC2's limits.
MAX_TOKEN = 64
MAX_TYPE_PATTERN = 30
#: Sentences of errors that one message repeats, for each usage class.
MAX_SHOWN = 8
ANY_TYPE = "*"
_REFUSED = frozenset({Kind.PERMISSION, Kind.CREDENTIALS})


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """Who could not give what, and what it said."""

    code: str
    sentence: str
    #: spot, on-demand, or empty where it is about neither.
    usage: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fleet:
    instances: tuple[Launched, ...] = ()
    refusals: tuple[Refusal, ...] = ()


def client_token(token: str) -> str:
    """As it is where EC2 takes it, else a digest of it."""
    if len(token) <= MAX_TOKEN and token.isascii() and token.isprintable():
        return token
    return hashlib.sha256(token.encode()).hexdigest()


def machine_tags(request: LaunchRequest, options: Options, pool: str) -> dict[str, str]:
    """From the start: there is no moment at which a machine of ours could not be told from others."""
    tags = {
        GHR_ENVIRONMENT_TAG: options.environment or pool,
        GHR_APPLICATION_TAG: GHR_APPLICATION,
        GHR_OWNER_TAG: request.scope,
        GHR_TYPE_TAG: "Repo" if "/" in request.scope else "Org",
    }
    tags |= request.tags
    return tags | {
        POOL_TAG: pool,
        PROVISION_TAG: request.provision_id,
        # Rounded up: what is given is never less than what was meant.
        FIRST_LIFE_TAG: str(max(1, -int(-request.first_life_s // 1))),
        MARGIN_TAG: f"{request.margin_s:g}",
    }


def requirements(request: RunnerRequest) -> dict[str, Any]:
    wanted = request.resource_class
    asked: dict[str, Any] = {"VCpuCount": {"Min": wanted.cpu}, "MemoryMiB": {"Min": wanted.memory_mib}}
    words = request.patterns.words
    for word in words:
        if len(word) > MAX_TYPE_PATTERN:
            raise UserError(
                f"allowed-instance-types: {word!r} is longer than EC2 takes",
                field="allowed-instance-types",
                fix=f"use at most {MAX_TYPE_PATTERN} characters for each pattern",
            )
    # Any of the words will do: with `*` among them the others say nothing.
    if not any(set(word) == {ANY_TYPE} for word in words):
        asked["AllowedInstanceTypes"] = list(words)
        # EC2 leaves these kinds out unless it is told otherwise: who names one means it.
        if any(word.startswith("t") for word in words):
            asked["BurstablePerformance"] = "included"
        if any("metal" in word for word in words):
            asked["BareMetal"] = "included"
    return asked


def fleet_request(
    *,
    template: str,
    request: RunnerRequest,
    subnets: Sequence[str],
    count: int,
    usage: UsageClass,
    token: str,
    tags: Mapping[str, str],
) -> dict[str, Any]:
    needs = requirements(request)
    pairs = [{"Key": key, "Value": value} for key, value in sorted(tags.items())]
    asked: dict[str, Any] = {
        "Type": "instant",
        "ClientToken": token,
        "LaunchTemplateConfigs": [
            {
                "LaunchTemplateSpecification": {"LaunchTemplateName": template, "Version": "$Default"},
                "Overrides": [{"SubnetId": subnet, "InstanceRequirements": needs} for subnet in subnets],
            }
        ],
        "TargetCapacitySpecification": {"TotalTargetCapacity": count, "DefaultTargetCapacityType": usage.value},
        "TagSpecifications": [{"ResourceType": kind, "Tags": pairs} for kind in ("instance", "volume")],
    }
    if usage is UsageClass.SPOT:
        asked["SpotOptions"] = {
            "AllocationStrategy": "price-capacity-optimized",
            "InstanceInterruptionBehavior": "terminate",
        }
    else:
        asked["OnDemandOptions"] = {"AllocationStrategy": "lowest-price"}
    return asked


def parse_fleet(answer: Mapping[str, Any], usage: UsageClass) -> Fleet:
    """`usage` is what was asked for: an instant fleet gives that or nothing."""
    instances = [
        Launched(instance_id=str(name), instance_type=str(group.get("InstanceType", "")), usage_class=usage)
        for group in answer.get("Instances") or ()
        for name in group.get("InstanceIds") or ()
    ]
    refusals = dict.fromkeys(_refusal(item) for item in answer.get("Errors") or ())
    return Fleet(
        # In one order: the same launch gives the same answer, however it is found.
        instances=tuple(sorted(instances, key=lambda item: item.instance_id)),
        refusals=tuple(refusals),
    )


def _refusal(item: Mapping[str, Any]) -> Refusal:
    overrides = (item.get("LaunchTemplateAndOverrides") or {}).get("Overrides") or {}
    who = " ".join(
        str(overrides[name]) for name in ("SubnetId", "AvailabilityZone", "InstanceType") if overrides.get(name)
    )
    code = str(item.get("ErrorCode", "unknown"))
    said = " ".join(str(item.get("ErrorMessage", "")).split())[:MAX_SAID]
    usage = str(item.get("Lifecycle") or "")
    return Refusal(code=code, sentence=f"{who or 'EC2'}{f' ({usage})' if usage else ''}: {code}: {said}", usage=usage)


def sentences(refusals: Sequence[Refusal]) -> tuple[str, ...]:
    """The first few of each usage class, and how many there are."""
    told: list[str] = []
    for usage in dict.fromkeys(refusal.usage for refusal in refusals):
        same = [refusal.sentence for refusal in refusals if refusal.usage == usage]
        told += same[:MAX_SHOWN]
        if len(same) > MAX_SHOWN:
            told.append(f"and {len(same) - MAX_SHOWN} more")
    return tuple(told)


def is_shortage(refusals: Sequence[Refusal]) -> bool:
    """Whether another usage class may help: nothing that was said is about the request itself, or our haste."""
    kinds = {kind_of(item.code) for item in refusals}
    return not kinds & {*_REFUSED, Kind.INPUT} and kinds != {Kind.THROTTLED}


def failure(request: RunnerRequest, count: int, refusals: Sequence[Refusal]) -> RemudaError:
    """Nothing was launched: what the caller can do about it."""
    wanted = request.resource_class
    kinds = {kind_of(refusal.code) for refusal in refusals}
    said = "; ".join(sentences(refusals)) or "no reason was given"
    story = (
        f"none of {count} {request.usage_class} instances of types {request.patterns} for class {wanted.name} "
        f"({wanted.cpu} cpu, {wanted.memory_mib} MiB) could be launched: {said}"
    )
    if kinds & _REFUSED:
        return UserError(story, field="aws-permission", fix=PERMISSION_FIX)
    if kinds == {Kind.INPUT}:
        return UserError(story, field="launch", fix=LAUNCH_FIX)
    if kinds == {Kind.THROTTLED}:
        return Throttled(story, retry_after_s=RETRY_AFTER_S)
    return CapacityError(story, fix=QUOTA_FIX if Kind.QUOTA in kinds else CAPACITY_FIX)
