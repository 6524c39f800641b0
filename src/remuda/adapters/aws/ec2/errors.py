"""EC2's errors as ours: one place for all of them."""

from __future__ import annotations

import re

from botocore.exceptions import ClientError, NoCredentialsError, PartialCredentialsError

from remuda.domain.errors import CapacityError, NotFound, RemudaError, Throttled, TimedOut, Unavailable, UserError

#: What we say to be left alone for: EC2 names no time.
RETRY_AFTER_S = 2.0
MAX_SAID = 300

_CAPACITY = frozenset(
    {
        "InsufficientCapacity",
        "InsufficientCapacityOnHost",
        "InsufficientHostCapacity",
        "InsufficientInstanceCapacity",
        "InsufficientFreeAddressesInSubnet",
        "InsufficientReservedInstanceCapacity",
        "InvalidFleetConfiguration",
        "SpotMaxPriceTooLow",
        "UnfulfillableCapacity",
        "Unsupported",
        "UnsupportedOperation",
    }
)
_QUOTA = frozenset(
    {
        "FleetLimitExceeded",
        "InstanceLimitExceeded",
        "MaxSpotInstanceCountExceeded",
        "ResourceLimitExceeded",
        "VcpuLimitExceeded",
        "VolumeLimitExceeded",
    }
)
_THROTTLING = frozenset(
    {
        "EC2ThrottledException",
        "RequestLimitExceeded",
        "RequestThrottled",
        "SlowDown",
        "Throttling",
        "ThrottlingException",
        "TooManyRequestsException",
    }
)
_PERMISSION = frozenset({"AccessDenied", "AccessDeniedException", "UnauthorizedOperation"})
_CREDENTIALS = frozenset(
    {
        "AuthFailure",
        "Blocked",
        "ExpiredToken",
        "InvalidClientTokenId",
        "MissingAuthenticationToken",
        "OptInRequired",
        "PendingVerification",
        "RequestExpired",
        "SignatureDoesNotMatch",
        "UnrecognizedClientException",
    }
)
_SERVER = frozenset({"InternalError", "InternalFailure", "ServiceUnavailable", "Unavailable", "RequestTimeout"})
_BAD_INPUT = re.compile(
    r"Invalid.*|Malformed.*|Missing.*|.*NotFound|.*NotFoundException|Unknown.*|IdempotentParameterMismatch|Validation.*"
)

QUOTA_FIX = "ask AWS for a higher quota of running instances (Service Quotas), or lower max-instances"
CAPACITY_FIX = "allow more instance types or subnets, another usage class, or try later"
PERMISSION_FIX = "give the role the rights of Remuda's control plane"


def is_permission(code: str) -> bool:
    return code in _PERMISSION or code in _CREDENTIALS


def is_throttling(code: str) -> bool:
    return code in _THROTTLING


def is_quota(code: str) -> bool:
    return code in _QUOTA


def is_capacity(code: str) -> bool:
    return code in _CAPACITY or code in _QUOTA


def is_bad_input(code: str) -> bool:
    return not is_capacity(code) and _BAD_INPUT.fullmatch(code) is not None


def code_of(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def said_by(error: ClientError) -> str:
    return " ".join(str(error.response.get("Error", {}).get("Message", "")).split())[:MAX_SAID]


def from_code(code: str, said: str, what: str) -> RemudaError:
    story = f"EC2 {what}: {code}: {said}"
    if is_throttling(code):
        return Throttled(f"EC2 limits our calls ({what}): {code}", retry_after_s=RETRY_AFTER_S)
    if code in _PERMISSION:
        return UserError(story, field="aws-permission", fix=PERMISSION_FIX)
    if code in _CREDENTIALS:
        return UserError(story, field="aws-credentials", fix="set valid AWS credentials for this region")
    if is_quota(code):
        return CapacityError(story, fix=QUOTA_FIX)
    if is_capacity(code):
        return CapacityError(story, fix=CAPACITY_FIX)
    if code in _SERVER:
        return Unavailable(story)
    if code.startswith("InvalidInstanceID."):
        return NotFound(story)
    if is_bad_input(code):
        return UserError(story, field="launch", fix="correct the launch options and run remuda refresh")
    return Unavailable(story)


def translate(error: Exception, what: str) -> RemudaError:
    """`what` is the operation. What EC2 says is quoted; requests and credentials are not."""
    if isinstance(error, ClientError):
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        if status >= 500 and not is_throttling(code_of(error)) and not is_capacity(code_of(error)):
            return Unavailable(f"EC2 {what}: {status} {code_of(error)}")
        return from_code(code_of(error), said_by(error), what)
    if isinstance(error, NoCredentialsError | PartialCredentialsError):
        return UserError(
            f"there are no AWS credentials (EC2 {what})", field="aws-credentials", fix="set them, or give a role"
        )
    if isinstance(error, TimeoutError) or "Timeout" in type(error).__name__:
        return TimedOut(f"EC2 did not answer in time ({what})")
    return Unavailable(f"EC2 cannot be reached ({what}): {type(error).__name__}")
