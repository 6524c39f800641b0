"""Launches with EC2 CreateFleet: request, response, lost responses, and fallback from spot to on-demand."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from botocore.exceptions import ClientError

from remuda.adapters.aws.calls import (
    CAPACITY_FIX,
    MAX_MESSAGE,
    RETRY_AFTER_S,
    SPOT_QUOTA,
    ErrorCategory,
    category_of,
    fix_of,
)
from remuda.adapters.aws.ec2.calls import MAX_ATTEMPTS, Ec2Calls, by_tag, describe_machines
from remuda.adapters.aws.ec2.options import Ec2LaunchOptions
from remuda.adapters.aws.user_data import FIRST_LIFE_TAG, MARGIN_TAG
from remuda.domain.errors import CapacityError, RemudaError, Throttled, Unavailable, UserError
from remuda.domain.resources import RunnerRequest, UsageClass
from remuda.domain.scale_down.fleet import (
    GHR_APPLICATION,
    GHR_APPLICATION_TAG,
    GHR_ENVIRONMENT_TAG,
    GHR_OWNER_TAG,
    GHR_TYPE_TAG,
)
from remuda.ports.compute import POOL_TAG, PROVISION_TAG, Launched, LaunchRequest, LaunchResult

#: Tag with the client token of the CreateFleet call. A provision may make several calls.
LAUNCH_TAG = "remuda:launch"
#: EC2's limits.
MAX_TOKEN = 64
MAX_TYPE_PATTERN = 30
#: Zones of one launch. Each has an InstanceRequirements structure, and a request has up to four of them
#: (ec2-fleet-attribute-based-instance-type-selection.html in the EC2 User Guide).
MAX_ZONES = 4
#: Errors quoted per usage class in one message.
MAX_SHOWN = 8
#: The code of a Local Zone or a Wavelength Zone, such as us-west-2-lax-1a: the code of its region, and more than the
#: letter of an availability zone ("Regions and Zones" in the EC2 User Guide).
_LOCAL_ZONE = re.compile(r"[a-z]+(-[a-z]+)+-[0-9]+-.+")
#: EC2's value for no limit of the price.
ANY_PRICE = 999_999
#: An earlier call had the same client token and other parameters.
_TOKEN_USED = frozenset({"IdempotentParameterMismatch"})
#: Suffix of the client token of the on-demand fallback.
FALLBACK_SUFFIX = "-od"
#: Attempts to find all instances of a launch whose response was lost: DescribeInstances is eventually consistent.
FIND_ATTEMPTS = 3
_ACCESS_ERRORS = frozenset({ErrorCategory.PERMISSION, ErrorCategory.CREDENTIALS})
#: What passes by itself.
_TEMPORARY = frozenset({ErrorCategory.THROTTLED, ErrorCategory.VERIFICATION, ErrorCategory.SERVER, ErrorCategory.OTHER})
#: Code of Remuda's own error: some instances of a lost response were found, and why the others are missing is unknown.
_ANSWER_LOST = "AnswerLost"
#: Errors that on-demand instances of the same types in the same subnets may not have: the spot market and its quota.
_SPOT_ONLY = frozenset(
    {
        "InsufficientInstanceCapacity",
        "InvalidFleetConfiguration",
        "SpotMaxPriceTooLow",
        "UnfulfillableCapacity",
        "Unsupported",
        # A repeated launch finds the on-demand instances that its first attempt launched instead of spot instances.
        _ANSWER_LOST,
        SPOT_QUOTA,
    }
)
#: Categories of errors that fail every launch of the pool. In this order, their fixes are given first.
_FAILS_EVERY_LAUNCH = (
    ErrorCategory.VERIFICATION,
    ErrorCategory.PERMISSION,
    ErrorCategory.CREDENTIALS,
    ErrorCategory.INPUT,
    ErrorCategory.QUOTA,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetLaunchError:
    """One entry of `Errors` in the response of CreateFleet."""

    code: str
    sentence: str
    #: "spot", "on-demand", or empty if the error is about neither.
    usage: str = ""
    #: What can be done about it, or empty.
    fix: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetLaunch:
    """Result of one CreateFleet call."""

    instances: tuple[Launched, ...] = ()
    errors: tuple[FleetLaunchError, ...] = ()


class FleetLauncher:
    def __init__(self, *, calls: Ec2Calls, pool: str, template: str) -> None:
        self._calls = calls
        self._pool = pool
        self._template = template

    async def launch(
        self, request: LaunchRequest, options: Ec2LaunchOptions, *, may_have_launched: bool
    ) -> LaunchResult:
        """Launch with CreateFleet. `may_have_launched`: an earlier call with this token may have succeeded."""
        usage = request.request.usage_class
        fleet = await self._create(
            request, options, usage, request.count, request.client_token, may_have_launched=may_have_launched
        )
        missing = request.count - len(fleet.instances)
        if missing and usage is UsageClass.SPOT and options.falls_back and is_mended_by_on_demand(fleet.errors):
            fleet = await self._add_on_demand(request, options, fleet, missing, may_have_launched=may_have_launched)
        if not fleet.instances:
            raise launch_failure(request.request, request.count, fleet.errors)
        return LaunchResult(instances=fleet.instances, errors=summarize(fleet.errors), fix=describe_fixes(fleet.errors))

    async def _add_on_demand(
        self,
        request: LaunchRequest,
        options: Ec2LaunchOptions,
        spot: FleetLaunch,
        missing: int,
        *,
        may_have_launched: bool,
    ) -> FleetLaunch:
        token = request.client_token + FALLBACK_SUFFIX
        try:
            more = await self._create(
                request, options, UsageClass.ON_DEMAND, missing, token, may_have_launched=may_have_launched
            )
        except RemudaError as error:
            if not spot.instances:
                raise
            # The spot instances exist: the caller must learn their ids.
            failed = FleetLaunchError(code=type(error).__name__, sentence=error.message, fix=error.fix)
            more = FleetLaunch(errors=(failed,))
        return FleetLaunch(instances=_sorted((*spot.instances, *more.instances)), errors=(*spot.errors, *more.errors))

    async def _create(
        self,
        request: LaunchRequest,
        options: Ec2LaunchOptions,
        usage: UsageClass,
        count: int,
        token: str,
        *,
        may_have_launched: bool,
    ) -> FleetLaunch:
        """Call CreateFleet. Before a retry, search for instances that the earlier call launched.

        EC2 itself would recognise the client token, but not every EC2-compatible server does.
        """
        token = client_token(token)
        parameters = fleet_request(
            template=self._template,
            request=request.request,
            subnets=options.subnets,
            count=count,
            usage=usage,
            token=token,
            tags={**machine_tags(request, options, self._pool), LAUNCH_TAG: token},
        )
        for attempt in range(1, MAX_ATTEMPTS + 1):
            if may_have_launched or attempt > 1:
                found = await self._find(token, count, usage)
                if found is not None:
                    return found
            try:
                answer = await self._calls.call("CreateFleet", idempotent=False, raw_codes=_TOKEN_USED, **parameters)
                return parse_fleet(answer, usage)
            except Throttled:
                raise
            except Unavailable:
                if attempt == MAX_ATTEMPTS:
                    raise
            except ClientError as error:
                # Another process launched with this token, in other subnets of the same zones. Find its instances.
                if attempt == MAX_ATTEMPTS:
                    raise Unavailable("EC2 CreateFleet: the instances of an earlier call are not visible") from error
            await self._calls.pause(attempt)
        raise AssertionError  # pragma: no cover - the loop returns or raises

    async def _find(self, token: str, count: int, usage: UsageClass) -> FleetLaunch | None:
        """The instances that an earlier call with this token launched, or None if there are none."""
        instances: tuple[Launched, ...] = ()
        for attempt in range(1, FIND_ATTEMPTS + 1):
            views = await describe_machines(self._calls, by_tag(LAUNCH_TAG, token) + by_tag(POOL_TAG, self._pool))
            instances = _sorted(
                Launched(instance_id=view.instance_id, instance_type=view.instance_type, usage_class=usage)
                for view in views
            )
            if not instances:
                return None
            if len(instances) >= count:
                return FleetLaunch(instances=instances)
            if attempt < FIND_ATTEMPTS:
                await self._calls.pause(attempt)
        sentence = (
            f"the response of CreateFleet was lost; {len(instances)} of {count} instances were found by their tag"
        )
        return FleetLaunch(instances=instances, errors=(FleetLaunchError(code=_ANSWER_LOST, sentence=sentence),))


# Request -----------------------------------------------------------------------------------------------------------


def client_token(token: str) -> str:
    """The token, or a digest of it if EC2 would not accept it."""
    if len(token) <= MAX_TOKEN and token.isascii() and token.isprintable():
        return token
    return hashlib.sha256(token.encode()).hexdigest()


def machine_tags(request: LaunchRequest, options: Ec2LaunchOptions, pool: str) -> dict[str, str]:
    """Tags that EC2 sets at launch, so that an instance of the pool is recognisable at any time.

    The `ghr:` tags are those of terraform-aws-github-runner, which scale-down uses.
    """
    tags = {
        GHR_ENVIRONMENT_TAG: options.environment or pool,
        GHR_APPLICATION_TAG: GHR_APPLICATION,
        GHR_OWNER_TAG: request.scope,
        GHR_TYPE_TAG: "Repo" if "/" in request.scope else "Org",
    }
    tags |= request.tags
    return (
        dict(options.tags)
        | tags
        | {
            POOL_TAG: pool,
            PROVISION_TAG: request.provision_id,
            # Rounded up: the machine never gets less time than requested.
            FIRST_LIFE_TAG: str(max(1, -int(-request.first_life_s // 1))),
            MARGIN_TAG: f"{request.margin_s:g}",
        }
    )


def one_subnet_per_zone(subnets: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The subnets to launch in by zone, of subnets that DescribeSubnets returned: those with the most free addresses.

    CreateFleet rejects two subnets of one zone: "The fleet configuration contains duplicate instance pools."
    (fleet-quotas.html in the EC2 User Guide; github-aws-runners/terraform-aws-github-runner, issues 2904 and 5297), and
    more than `MAX_ZONES`.
    """
    by_zone: dict[str, str] = {}
    usable = without_local_zones(subnets)
    for subnet in sorted(usable, key=lambda item: -item.get("AvailableIpAddressCount", 0)):
        by_zone.setdefault(str(subnet.get("AvailabilityZone", "")), str(subnet.get("SubnetId", "")))
    return dict(list(by_zone.items())[:MAX_ZONES])


def without_local_zones(subnets: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The subnets of availability zones, or all if every subnet is in a Local Zone or a Wavelength Zone.

    Local Zones offer few instance types, and a launch uses only `MAX_ZONES` zones. Example: a default VPC with subnets
    in us-west-2a to us-west-2d and a large one in us-west-2-lax-1a, which would replace one of the four.
    """
    return [each for each in subnets if not _LOCAL_ZONE.fullmatch(str(each.get("AvailabilityZone", "")))] or [*subnets]


def requirements(request: RunnerRequest) -> dict[str, Any]:
    """EC2's InstanceRequirements for a request."""
    wanted = request.resource_class
    result: dict[str, Any] = {
        # The role of workflows may not launch larger instances.
        "VCpuCount": {"Min": wanted.cpu, "Max": wanted.largest_cpu},
        "MemoryMiB": {"Min": wanted.memory_mib},
    }
    if wanted.gpu:
        result |= {"AcceleratorTypes": ["gpu"], "AcceleratorCount": {"Min": wanted.gpu}}
    patterns = request.patterns.words
    for pattern in patterns:
        if len(pattern) > MAX_TYPE_PATTERN:
            raise UserError(
                f"allowed-instance-types: {pattern!r} is longer than EC2's limit of {MAX_TYPE_PATTERN} characters",
                field="allowed-instance-types",
                fix=f"use at most {MAX_TYPE_PATTERN} characters for each pattern",
            )
    # A pattern `*` matches every type, so the others do not matter.
    if request.patterns.match_all:
        # EC2's defaults are both generations and any number of accelerators (API reference of
        # InstanceRequirementsRequest). For spot, the old generations are often those with the most capacity
        # (kubernetes-sigs/karpenter#2137).
        result["InstanceGenerations"] = ["current"]
        result.setdefault("AcceleratorCount", {"Max": 0})
    else:
        result["AllowedInstanceTypes"] = list(patterns)
        # Without these, EC2 ignores types that cost over 20 % more than the cheapest one with these attributes, and
        # has a separate limit for spot instances (API reference of InstanceRequirementsRequest).
        result["OnDemandMaxPricePercentageOverLowestPrice"] = ANY_PRICE
        result["MaxSpotPriceAsPercentageOfOptimalOnDemandPrice"] = ANY_PRICE
        # EC2 excludes burstable and bare-metal types unless the request includes them.
        if any(pattern.startswith("t") for pattern in patterns):
            result["BurstablePerformance"] = "included"
        if any("metal" in pattern for pattern in patterns):
            result["BareMetal"] = "included"
    return result


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
    """Parameters of CreateFleet."""
    override: dict[str, Any] = {"InstanceRequirements": requirements(request)}
    if request.resource_class.ami:
        # EC2 considers only instance types with the architecture of the image.
        override["ImageId"] = request.resource_class.ami
    pairs = [{"Key": key, "Value": value} for key, value in sorted(tags.items())]
    parameters: dict[str, Any] = {
        "Type": "instant",
        "ClientToken": token,
        "LaunchTemplateConfigs": [
            {
                "LaunchTemplateSpecification": {"LaunchTemplateName": template, "Version": "$Default"},
                "Overrides": [{"SubnetId": subnet, **override} for subnet in subnets],
            }
        ],
        "TargetCapacitySpecification": {"TotalTargetCapacity": count, "DefaultTargetCapacityType": usage.value},
        # The fleet, too: IAM allows only fleets with the tag of the pool.
        "TagSpecifications": [{"ResourceType": kind, "Tags": pairs} for kind in ("instance", "volume", "fleet")],
    }
    if usage is UsageClass.SPOT:
        parameters["SpotOptions"] = {
            "AllocationStrategy": "price-capacity-optimized",
            "InstanceInterruptionBehavior": "terminate",
        }
    else:
        parameters["OnDemandOptions"] = {"AllocationStrategy": "lowest-price"}
    return parameters


# Response ----------------------------------------------------------------------------------------------------------


def parse_fleet(answer: Mapping[str, Any], usage: UsageClass) -> FleetLaunch:
    """`usage` is the requested usage class: an instant fleet never launches the other one."""
    instances = [
        Launched(instance_id=str(name), instance_type=str(group.get("InstanceType", "")), usage_class=usage)
        for group in answer.get("Instances") or ()
        for name in group.get("InstanceIds") or ()
    ]
    errors = dict.fromkeys(_launch_error(item) for item in answer.get("Errors") or ())
    return FleetLaunch(instances=_sorted(instances), errors=tuple(errors))


def _sorted(instances: Iterable[Launched]) -> tuple[Launched, ...]:
    """In a fixed order, so that a repeated launch returns the same result whether it was created or found."""
    return tuple(sorted(instances, key=lambda each: each.instance_id))


def _launch_error(item: Mapping[str, Any]) -> FleetLaunchError:
    overrides = (item.get("LaunchTemplateAndOverrides") or {}).get("Overrides") or {}
    source = " ".join(
        str(overrides[name]) for name in ("SubnetId", "AvailabilityZone", "InstanceType") if overrides.get(name)
    )
    code = str(item.get("ErrorCode", "unknown"))
    message = " ".join(str(item.get("ErrorMessage", "")).split())[:MAX_MESSAGE]
    usage = str(item.get("Lifecycle") or "")
    sentence = f"{source or 'EC2'}{f' ({usage})' if usage else ''}: {code}: {message}"
    return FleetLaunchError(code=code, sentence=sentence, usage=usage, fix=fix_of(code))


def summarize(errors: Sequence[FleetLaunchError]) -> tuple[str, ...]:
    """The first errors of each usage class as sentences, and the number of the others."""
    sentences: list[str] = []
    for usage in dict.fromkeys(error.usage for error in errors):
        same = [error.sentence for error in errors if error.usage == usage]
        sentences += same[:MAX_SHOWN]
        if len(same) > MAX_SHOWN:
            sentences.append(f"and {len(same) - MAX_SHOWN} more")
    return tuple(sentences)


def is_mended_by_on_demand(errors: Sequence[FleetLaunchError]) -> bool:
    """Whether on-demand instances may be launched instead: spot is short, and nothing else fails their launch as well.

    For example, a full spot market is mended by on-demand instances; a quota of volumes is not.
    """
    codes = {error.code for error in errors}
    if any(category_of(code) in _FAILS_EVERY_LAUNCH for code in codes - _SPOT_ONLY):
        return False
    # Without an error, EC2 has launched fewer than requested and gave no reason.
    return not codes or bool(codes & _SPOT_ONLY)


def describe_fixes(errors: Sequence[FleetLaunchError]) -> str:
    """What can be done about the errors, each fix once: those that every launch needs first."""
    order = {category: number for number, category in enumerate(_FAILS_EVERY_LAUNCH)}
    ordered = sorted(errors, key=lambda error: order.get(category_of(error.code), len(order)))
    return "; ".join(dict.fromkeys(error.fix for error in ordered if error.fix))


def launch_failure(request: RunnerRequest, count: int, errors: Sequence[FleetLaunchError]) -> RemudaError:
    """The error to raise if no instance was launched."""
    wanted = request.resource_class
    categories = {category_of(error.code) for error in errors}
    reasons = "; ".join(summarize(errors)) or "EC2 gave no reason"
    # The reasons come early: records of provisions keep only the beginning.
    text = (
        f"none of {count} {request.usage_class} instances of types {request.patterns} could be launched: {reasons}; "
        f"class {wanted.name} needs {wanted.cpu} to {wanted.largest_cpu} cpu and {wanted.memory_mib} MiB"
    )
    fix = describe_fixes(errors) or CAPACITY_FIX
    if categories & _ACCESS_ERRORS:
        return UserError(text, field="aws-permission", fix=fix)
    if categories == {ErrorCategory.INPUT}:
        return UserError(text, field="launch", fix=fix)
    if categories == {ErrorCategory.THROTTLED}:
        return Throttled(text, retry_after_s=RETRY_AFTER_S)
    if categories and categories <= _TEMPORARY:
        return Unavailable(text, fix=fix)
    return CapacityError(text, fix=fix)
