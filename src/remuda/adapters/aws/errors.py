"""What AWS, botocore and the network say, as Remuda's errors: the one place that knows their codes.

An answer that was lost (`TimedOut`, `Unavailable`) may have been a yes: callers of conditional writes read and see.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Awaitable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import Any, TypeVar

import aiohttp
from botocore import exceptions as boto
from botocore.parsers import ResponseParserError

from remuda.domain.errors import CapacityError, NotFound, RemudaError, Throttled, TimedOut, Unavailable, UserError

T = TypeVar("T")

#: How much of a service's own words an error repeats.
MAX_SAID = 300
#: How long a service that throttles after all tries is left alone: none names a time.
RETRY_AFTER_S = 2.0

DYNAMODB, SQS, EC2 = "DynamoDB", "SQS", "EC2"

CONDITION_FAILED = "ConditionalCheckFailedException"
#: A condition of one of its parts did not hold, or somebody else wrote at the same time: nothing was written. Not so
#: TransactionInProgressException: our own earlier attempt is still under way, and may yet be carried out.
TRANSACTION_REFUSED = frozenset({"TransactionCanceledException", "TransactionConflictException"})
#: What a refused transaction says of a part whose condition did not hold, and of one that is not to blame.
PART_CONDITION_FAILED, PART_BLAMELESS = "ConditionalCheckFailed", "None"
TABLE_MISSING = "ResourceNotFoundException"
TABLE_BUSY = "ResourceInUseException"
VALIDATION = "ValidationException"
#: The first is what SQS says by its older protocol, and the newer one keeps it for compatibility.
QUEUE_MISSING = frozenset({"AWS.SimpleQueueService.NonExistentQueue", "QueueDoesNotExist"})
_QUEUE_JUST_DELETED = frozenset({"AWS.SimpleQueueService.QueueDeletedRecently", "QueueDeletedRecently"})

CAPACITY_FIX = "allow more instance types or subnets, another usage class, or try later"
QUOTA_FIX = "ask AWS for a higher quota of running instances (Service Quotas), or lower max-instances"
PERMISSION_FIX = "give the role the rights of Remuda's control plane (deploy/policies)"
LAUNCH_FIX = "correct the launch options and run remuda refresh"
_CREDENTIALS_FIX = "set valid AWS credentials for this region"
_TABLE_FIX = "run remuda refresh, or check the region and the pool's name"

#: What the library raises in place of an answer.
FAILURES = (boto.BotoCoreError, boto.ClientError, ResponseParserError, aiohttp.ClientError, OSError)


#: Where botocore takes answers apart, and who takes what comes of it for a document.
_PARSERS = frozenset({"botocore.parsers", "aiobotocore.parsers"})
_TAKERS = tuple(
    f"{of}botocore.{part}" for of in ("", "aio") for part in ("endpoint", "client", "errorfactory", "model", "retr")
)


async def answered(call: Awaitable[T]) -> T:
    """One call. What no service would send fails botocore's parsers in ways of their own: here, in one."""
    try:
        return await call
    except Exception as error:
        if isinstance(error, FAILURES) or not _is_of_parsers(error):
            raise
        raise ResponseParserError(f"an answer cannot be read: {type(error).__name__}") from error


def _is_of_parsers(error: Exception) -> bool:
    modules = [str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(error.__traceback__)]
    return modules[-1].startswith(_TAKERS) or not _PARSERS.isdisjoint(modules)


class Kind(Enum):
    """What a code is about."""

    THROTTLED = "throttled"
    PERMISSION = "permission"
    CREDENTIALS = "credentials"
    QUOTA = "quota"
    CAPACITY = "capacity"
    SERVER = "server"
    INPUT = "input"
    OTHER = "other"


_CODES = {
    Kind.THROTTLED: """
        EC2ThrottledException ProvisionedThroughputExceededException RequestLimitExceeded RequestThrottled
        RequestThrottledException SlowDown ThrottledException Throttling ThrottlingException TooManyRequestsException
    """,
    # The last one: the first spot machine of an account needs a role that EC2 would make by itself.
    Kind.PERMISSION: """
        AccessDenied AccessDeniedException KmsAccessDenied UnauthorizedOperation
        AuthFailure.ServiceLinkedRoleCreationNotPermitted
    """,
    Kind.CREDENTIALS: """
        AuthFailure Blocked ExpiredToken ExpiredTokenException IncompleteSignature InvalidAccessKeyId
        InvalidClientTokenId InvalidSignatureException MissingAuthenticationToken MissingAuthenticationTokenException
        OptInRequired PendingVerification RequestExpired SignatureDoesNotMatch UnrecognizedClientException
    """,
    Kind.QUOTA: """
        FleetLimitExceeded InstanceLimitExceeded MaxSpotInstanceCountExceeded ResourceLimitExceeded VcpuLimitExceeded
        VolumeLimitExceeded
    """,
    Kind.CAPACITY: """
        InsufficientCapacity InsufficientCapacityOnHost InsufficientFreeAddressesInSubnet InsufficientHostCapacity
        InsufficientInstanceCapacity InsufficientReservedInstanceCapacity InvalidFleetConfiguration SpotMaxPriceTooLow
        UnfulfillableCapacity Unsupported UnsupportedOperation
    """,
    Kind.SERVER: "InternalError InternalFailure InternalServerError RequestTimeout ServiceUnavailable Unavailable",
}
#: The machine does not allow it, as it is: protected, or on its way already. Asking again changes nothing.
_AS_IT_IS = frozenset({"OperationNotPermitted", "IncorrectInstanceState", "IncorrectState"})
_KINDS = {code: kind for kind, codes in _CODES.items() for code in codes.split()}
_INPUT = re.compile(
    r"(Invalid|Malformed|Missing|Unknown|Validation).*|.*NotFound(Exception)?|IdempotentParameterMismatch"
)

_NO_CREDENTIALS = (
    boto.NoCredentialsError,
    boto.PartialCredentialsError,
    boto.CredentialRetrievalError,
    boto.NoAuthTokenError,
    boto.TokenRetrievalError,
    boto.SSOError,
    boto.ProfileNotFound,
)
_TIMEOUTS = (boto.ConnectTimeoutError, boto.ReadTimeoutError, TimeoutError)
_SETTINGS = (boto.NoRegionError, boto.InvalidRegionError, boto.ConfigParseError, boto.ConfigNotFound)


def kind_of(code: str) -> Kind:
    return _KINDS.get(code) or (Kind.INPUT if _INPUT.fullmatch(code) else Kind.OTHER)


def code_of(error: boto.ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def said_by(error: boto.ClientError) -> str:
    return " ".join(str(error.response.get("Error", {}).get("Message", "")).split())[:MAX_SAID]


def item_of(error: boto.ClientError) -> dict[str, Any] | None:
    """The item that made a condition fail: it came with the refusal."""
    item: dict[str, Any] | None = error.response.get("Item")  # type: ignore[assignment]
    return item or None


def blames_of(error: boto.ClientError) -> list[str]:
    """What a refused transaction says of each of its parts, in their order; empty where it does not say."""
    reasons: list[Mapping[str, Any]] = error.response.get("CancellationReasons") or []  # type: ignore[assignment]
    return [str(reason.get("Code") or PART_BLAMELESS) for reason in reasons]


def attempts_of(response: Any) -> int:
    """How many requests went over the wire for one answer."""
    return 1 + int(response.get("ResponseMetadata", {}).get("RetryAttempts", 0))


@contextmanager
def translated(service: str, what: str) -> Iterator[None]:
    """Errors of botocore leave as Remuda's. `what` is the table, queue or operation that the call is about.

    Arguments that botocore itself refuses are a bug and leave as they are.
    """
    try:
        yield
    except boto.ParamValidationError:
        raise
    except FAILURES as error:
        raise translate(error, service, what) from error


@contextmanager
def settings_checked(service: str) -> Iterator[None]:
    """For the opening of a client, which says `ValueError` of an endpoint or a region that cannot be one."""
    try:
        with translated(service, service):
            yield
    except ValueError as error:
        raise UserError(f"{service} cannot be called: {error}", fix="check AWS_ENDPOINT_URL and AWS_REGION") from error


def translate(error: Exception, service: str, what: str) -> RemudaError:
    """What a service says is quoted; requests and credentials are not."""
    if not isinstance(error, boto.ClientError):
        return _from_library(error, service, what)
    code, said = code_of(error), said_by(error)
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    # Whatever it is called: a server's own fault passes. EC2 gives some refusals such a status, too.
    if status >= 500 and kind_of(code) in {Kind.INPUT, Kind.OTHER}:
        return Unavailable(_story(service, what, code, said))
    return _of_service(code, said, service, what) or _of_kind(code, said, service, what)


def _of_service(code: str, said: str, service: str, what: str) -> RemudaError | None:
    """Codes that mean something to one service alone."""
    if service == DYNAMODB and code == TABLE_MISSING:
        return no_table(what)
    if service == DYNAMODB and code == VALIDATION:
        # Its expressions are ours and proven: what is left is a table with other keys or indexes.
        return UserError(f"table {what} does not work as a Remuda store: {said}", fix=_TABLE_FIX)
    if code in QUEUE_MISSING:
        return NotFound(f"no queue {what} in SQS", fix=_TABLE_FIX)
    if code in _QUEUE_JUST_DELETED:
        return Unavailable(f"queue {what} was deleted a moment ago: {said}", fix="run remuda refresh in a minute")
    if code in _AS_IT_IS:
        return UserError(_story(service, what, code, said), field="instance", fix="look at the machine itself")
    if code.startswith("InvalidInstanceID."):
        return NotFound(_story(service, what, code, said))
    return None


def _of_kind(code: str, said: str, service: str, what: str) -> RemudaError:
    story = _story(service, what, code, said)
    match kind_of(code):
        case Kind.THROTTLED:
            return Throttled(f"{service} limits our calls ({what}): {code}", retry_after_s=RETRY_AFTER_S)
        case Kind.PERMISSION:
            return UserError(story, field="aws-permission", fix=PERMISSION_FIX)
        case Kind.CREDENTIALS:
            return UserError(
                f"{service} refuses the AWS credentials ({what}): {code}: {said}",
                field="aws-credentials",
                fix=_CREDENTIALS_FIX,
            )
        case Kind.QUOTA:
            return CapacityError(story, fix=QUOTA_FIX)
        case Kind.CAPACITY:
            return CapacityError(story, fix=CAPACITY_FIX)
        case Kind.INPUT if service == EC2:
            return UserError(story, field="launch", fix=LAUNCH_FIX)
        case _:
            return Unavailable(story)


def _story(service: str, what: str, code: str, said: str) -> str:
    return f"{service} refuses ({what}): {code}: {said}".rstrip(": ")


def no_table(name: str) -> UserError:
    return UserError(f"no table {name} in DynamoDB", fix=_TABLE_FIX)


def wrong_table(name: str, differences: list[str]) -> UserError:
    return UserError(
        f"table {name} is not a Remuda store: {'; '.join(differences)}", fix="name another pool, or remove that table"
    )


def _from_library(error: Exception, service: str, what: str) -> RemudaError:
    if isinstance(error, _NO_CREDENTIALS):
        return UserError(
            f"{service} needs AWS credentials: {error}",
            field="aws-credentials",
            fix="set AWS credentials, a profile or a role",
        )
    if isinstance(error, _SETTINGS):
        return UserError(f"{service} cannot be called: {error}", fix="set AWS_REGION")
    where = getattr(error, "kwargs", {}).get("endpoint_url", "")
    at = f"{service} at {where}" if where else service
    if isinstance(error, _TIMEOUTS):
        return TimedOut(f"{at} did not answer in time ({what})")
    if isinstance(error, boto.EndpointConnectionError):
        return Unavailable(f"{at} cannot be reached ({what})")
    return Unavailable(f"the connection to {at} failed ({what}): {type(error).__name__}")
