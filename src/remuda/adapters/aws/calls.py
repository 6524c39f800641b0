"""Calls to AWS: their errors translated to Remuda's, their requests counted, several at a time.

After `TimedOut` or `Unavailable` the call may still have been carried out: callers of conditional writes read the
record to find out.
"""

from __future__ import annotations

import asyncio
import re
import traceback
from collections.abc import Awaitable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any, NamedTuple, TypeVar

from botocore import exceptions as boto

from remuda.adapters.aws.protocols import UnreadableResponse, UnsendableRequest
from remuda.domain.errors import CapacityError, NotFound, RemudaError, Throttled, TimedOut, Unavailable, UserError
from remuda.ports.calls import CallCounter

#: Maximum length of a service's message quoted in an error.
MAX_MESSAGE = 300
#: The quota of spot instances. On-demand instances have another one.
SPOT_QUOTA = "MaxSpotInstanceCountExceeded"
#: Seconds to wait after throttling that outlasts all retries. AWS does not name a time.
RETRY_AFTER_S = 2.0

DYNAMODB, SQS, EC2 = "DynamoDB", "SQS", "EC2"

CONDITION_FAILED = "ConditionalCheckFailedException"
#: A condition failed, or another write to one of the items was in progress: nothing was written.
#: TransactionInProgressException is not among them: our earlier attempt is still running and may yet succeed.
TRANSACTION_CANCELLED = frozenset({"TransactionCanceledException", "TransactionConflictException"})
#: Cancellation reasons of a transaction's items: its condition failed, or it did not cause the cancellation.
REASON_CONDITION_FAILED, NOT_THE_CAUSE = "ConditionalCheckFailed", "None"
TABLE_MISSING = "ResourceNotFoundException"
TABLE_BUSY = "ResourceInUseException"
VALIDATION = "ValidationException"
#: SQS's query protocol uses the first code; the JSON protocol still returns it for compatibility.
QUEUE_MISSING = frozenset({"AWS.SimpleQueueService.NonExistentQueue", "QueueDoesNotExist"})
_QUEUE_JUST_DELETED = frozenset({"AWS.SimpleQueueService.QueueDeletedRecently", "QueueDeletedRecently"})
#: SQS's codes for the key of an encrypted queue, in both protocols: KMS.AccessDeniedException and KmsAccessDenied.
_QUEUE_KEY = ("KMS.", "Kms")
_QUEUE_KEY_THROTTLED = frozenset({"KMS.ThrottlingException", "KmsThrottled"})

#: Fixes of categories. Codes with another cause have their own in `_CODES`.
CAPACITY_FIX = "allow more instance types or subnets, allow another usage class, or retry later"
PERMISSION_FIX = "grant the role the permissions of Remuda's control plane (deploy/policies)"
LAUNCH_FIX = "correct the launch options and run remuda refresh"
_CREDENTIALS_FIX = "set valid AWS credentials for this region"
_RETRY_FIX = "retry in a minute"
_QUEUE_KEY_FIX = "enable the KMS key of the queue, and permit its use by the role and in the key's own policy"
#: EC2 takes the account's default key for the encrypted root volume if volume-kms-key is not set.
KMS_FIX = (
    "enable the KMS key of volume-kms-key, or the account's default key of EBS, and permit its use by the role "
    "(deploy/policies/volume-key.json) and in the key's own policy"
)
_ENDED_BY_CALL_FIX = "find out in CloudTrail who called TerminateInstances or StopInstances"
_SPOT_END_FIX = "try again, allow more instance types, or use on-demand instances"
_UNKNOWN_FIX = (
    "look the code up in AWS's list (docs.aws.amazon.com/ec2/latest/devguide/errors-overview.html), and retry"
)
_TABLE_FIX = "run remuda refresh, or check the region and the pool name"

#: Exceptions of a call instead of a response.
FAILURES = (boto.BotoCoreError, boto.ClientError, OSError)
#: The instance is protected, or in a state that does not allow the operation. A retry does not help.
_WRONG_INSTANCE_STATE = frozenset({"OperationNotPermitted", "IncorrectInstanceState", "IncorrectState"})
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
T = TypeVar("T")

_PARSERS = frozenset({"botocore.parsers", "aiobotocore.parsers"})
#: Prefixes of modules that use a parsed response and fail if it has an unexpected shape. The prefix `retr` matches
#: `retries` and `retryhandler`.
_PARSER_USERS = tuple(
    f"{prefix}botocore.{module}"
    for prefix in ("", "aio")
    for module in ("endpoint", "client", "errorfactory", "model", "retr")
)
#: Codes of conditional writes that were not applied. They are regular answers, not failed calls.
_EXPECTED_CODES = TRANSACTION_CANCELLED | {CONDITION_FAILED}


class ErrorCategory(Enum):
    """Category of an AWS error code."""

    THROTTLED = "throttled"
    PERMISSION = "permission"
    CREDENTIALS = "credentials"
    #: AWS checks a new account, or its first use of a region.
    VERIFICATION = "verification"
    QUOTA = "quota"
    CAPACITY = "capacity"
    SERVER = "server"
    INPUT = "input"
    OTHER = "other"


class _Codes(NamedTuple):
    """Codes with the same category and the same fix, for example both limits of EBS."""

    category: ErrorCategory
    fix: str
    codes: str


#: The codes of "Error codes for the Amazon EC2 API" (errors-overview.html in the EC2 Developer Guide) that a launch, or
#: a change of tags or templates, can end with, and codes of other services. MaxFleetCountExceeded is not in the list;
#: Karpenter handles it (pkg/errors/errors.go of aws/karpenter-provider-aws).
_CODES = (
    _Codes(
        ErrorCategory.THROTTLED,
        "",
        """
        EC2ThrottledException ProvisionedThroughputExceededException RequestLimitExceeded RequestThrottled
        RequestThrottledException SlowDown ThrottledException Throttling ThrottlingException TooManyRequestsException
        """,
    ),
    _Codes(ErrorCategory.PERMISSION, PERMISSION_FIX, "AccessDenied AccessDeniedException UnauthorizedOperation"),
    _Codes(
        # The first spot instance of an account needs a service-linked role, which EC2 tries to create.
        ErrorCategory.PERMISSION,
        "run aws iam create-service-linked-role --aws-service-name spot.amazonaws.com",
        "AuthFailure.ServiceLinkedRoleCreationNotPermitted",
    ),
    _Codes(
        # CreateFleet itself fails with it, not only single launches (runs-on/runs-on#485).
        ErrorCategory.PERMISSION,
        "let the organization's tag policy accept the tag that the message names",
        "TagPolicyViolation",
    ),
    _Codes(
        ErrorCategory.PERMISSION,
        KMS_FIX,
        "CustomerKeyHasBeenRevoked InvalidKMSKey.InvalidState KMSKeyNotAccessible KMSKeyNotAccessibleFault "
        "KmsAccessDenied",
    ),
    _Codes(
        ErrorCategory.PERMISSION,
        "complete what the message says about the AWS account, or ask AWS Support",
        "AccountDisabled Blocked OptInRequired",
    ),
    _Codes(
        # EC2's message: "normally resolved within minutes, please allow up to 4 hours ... We will notify you by email"
        # (skyplane-project/skyplane#799).
        ErrorCategory.VERIFICATION,
        "wait until AWS has verified the account for this region and sends an e-mail: minutes as a rule, at most four "
        "hours; then try again, or write to AWS Support",
        "PendingVerification",
    ),
    _Codes(
        ErrorCategory.CREDENTIALS,
        _CREDENTIALS_FIX,
        """
        AuthFailure ExpiredToken ExpiredTokenException IncompleteSignature InvalidAccessKeyId InvalidClientTokenId
        InvalidSignatureException MissingAuthenticationToken MissingAuthenticationTokenException RequestExpired
        SignatureDoesNotMatch UnrecognizedClientException
        """,
    ),
    _Codes(
        ErrorCategory.QUOTA,
        "request a higher quota of running on-demand instances (Service Quotas, Amazon EC2), or lower max-instances",
        "InstanceLimitExceeded VcpuLimitExceeded",
    ),
    _Codes(
        ErrorCategory.QUOTA,
        "request a higher quota of spot instances (Service Quotas, Amazon EC2), set spot-fallback to on-demand, or "
        "lower max-instances",
        SPOT_QUOTA,
    ),
    _Codes(
        ErrorCategory.QUOTA,
        "request a higher quota of fleets (Service Quotas, EC2 Fleet), or retry when other fleets have ended",
        "FleetLimitExceeded MaxFleetCountExceeded MaxSpotFleetRequestCountExceeded",
    ),
    _Codes(
        ErrorCategory.QUOTA,
        "request a higher quota of storage or IOPS (Service Quotas, Amazon EBS), or lower volume-size-gib, volume-iops "
        "or max-instances",
        "MaxIOPSLimitExceeded VolumeLimitExceeded",
    ),
    _Codes(
        ErrorCategory.QUOTA,
        "request a higher quota of network interfaces per Region (Service Quotas, Amazon VPC), or lower max-instances",
        "NetworkInterfaceLimitExceeded",
    ),
    _Codes(
        ErrorCategory.QUOTA,
        "delete launch templates or versions that are not used any more",
        "MaxTemplateLimitExceeded MaxTemplateVersionLimitExceeded",
    ),
    _Codes(
        ErrorCategory.QUOTA, "request fewer instances at a time", "RequestResourceCountExceeded ResourceCountExceeded"
    ),
    _Codes(
        ErrorCategory.QUOTA,
        "request a higher quota of the resource that the message names (Service Quotas)",
        "ResourceLimitExceeded",
    ),
    _Codes(
        ErrorCategory.CAPACITY,
        CAPACITY_FIX,
        """
        EncryptedVolumesNotSupported InsufficientAddressCapacity InsufficientCapacity InsufficientCapacityOnHost
        InsufficientHostCapacity InsufficientInstanceCapacity InsufficientReservedInstanceCapacity
        InvalidFleetConfiguration ReservationCapacityExceeded SpotMaxPriceTooLow UnfulfillableCapacity Unsupported
        UnsupportedOperation
        """,
    ),
    _Codes(
        ErrorCategory.CAPACITY,
        "add subnets with free addresses to subnet-ids and run remuda refresh, or retry when instances have ended",
        "InsufficientFreeAddressesInSubnet",
    ),
    _Codes(
        ErrorCategory.CAPACITY,
        "set another volume-type, add subnets of other zones to subnet-ids, and run remuda refresh, or retry later",
        "InsufficientVolumeCapacity VolumeTypeNotAvailableInZone",
    ),
    _Codes(
        ErrorCategory.SERVER,
        _RETRY_FIX,
        """
        ConcurrentTagAccess InternalError InternalFailure InternalServerError RequestTimeout RetryableError
        ServerInternal ServiceUnavailable Unavailable
        """,
    ),
    _Codes(
        ErrorCategory.INPUT,
        "remove tags of the resource that the message names: EC2 permits 50",
        "TagLimitExceeded",
    ),
    _Codes(
        ErrorCategory.INPUT,
        "give fewer security-group-ids and run remuda refresh, or request a higher quota of security groups per "
        "network interface (Service Quotas, Amazon VPC)",
        "SecurityGroupLimitExceeded SecurityGroupsPerInstanceLimitExceeded SecurityGroupsPerInterfaceLimitExceeded",
    ),
    _Codes(
        ErrorCategory.INPUT,
        LAUNCH_FIX,
        """
        AttachmentLimitExceeded BootForVolumeTypeUnsupported ClientInvalidParameterValue DefaultVpcDoesNotExist
        PrivateIpAddressLimitExceeded VPCIdNotSpecified VPCResourceNotSpecified VolumeIOPSLimit
        """,
    ),
)
#: Codes of the reason why EC2 ended an instance that need another fix than the error code of the same name. The others
#: are error codes after "Client." or "Server.", such as Client.VolumeLimitExceeded ("StateReason" in the EC2 API
#: Reference).
_STATE_FIXES = {
    # "Client error on launch": EC2 could not use the key of a volume or of the image's snapshot, in nearly all reports
    # (aws/karpenter-provider-aws#1407, "Instance terminates immediately" in the EC2 User Guide).
    "Client.InternalError": KMS_FIX,
    "Client.InstanceInitiatedShutdown": "read its console log: aws ec2 get-console-output --latest --instance-id ID",
    "Client.InstanceTerminated": _ENDED_BY_CALL_FIX,
    "Client.UserInitiatedShutdown": _ENDED_BY_CALL_FIX,
    "Client.InvalidSnapshot.NotFound": "set ami to an image whose snapshots exist, and run remuda refresh",
    "Server.SpotInstanceShutdown": _SPOT_END_FIX,
    "Server.SpotInstanceTermination": _SPOT_END_FIX,
}
_BY_CODE = {code: group for group in _CODES for code in group.codes.split()}
_INPUT_CODES = _Codes(ErrorCategory.INPUT, LAUNCH_FIX, "")
_OTHER_CODES = _Codes(ErrorCategory.OTHER, _UNKNOWN_FIX, "")


def category_of(code: str) -> ErrorCategory:
    return _group_of(code).category


def fix_of(code: str) -> str:
    """What a person can do about a code, as an imperative. Empty for throttling, which only needs time."""
    return _group_of(code).fix


def fix_of_end(code: str) -> str:
    """What a person can do about the code of a `StateReason`, as an imperative. Empty without a code."""
    return _STATE_FIXES.get(code) or (fix_of(code.partition(".")[2]) if code else "")


def _group_of(code: str) -> _Codes:
    return _BY_CODE.get(code) or (_INPUT_CODES if _INPUT.fullmatch(code) else _OTHER_CODES)


def code_of(error: boto.ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def message_of(error: boto.ClientError) -> str:
    return " ".join(str(error.response.get("Error", {}).get("Message", "")).split())[:MAX_MESSAGE]


def item_of(error: boto.ClientError) -> dict[str, Any] | None:
    """The stored item that failed the condition, if the error includes it."""
    item: dict[str, Any] | None = error.response.get("Item")  # type: ignore[assignment]
    return item or None


def cancellation_reasons(error: boto.ClientError) -> tuple[list[str], list[dict[str, Any] | None]]:
    """The cancellation code of each item of a transaction and the stored items whose condition failed, in order.

    Empty if the error does not list them.
    """
    reasons: list[Mapping[str, Any]] = error.response.get("CancellationReasons") or []  # type: ignore[assignment]
    codes = [str(reason.get("Code") or NOT_THE_CAUSE) for reason in reasons]
    return codes, [reason.get("Item") or None for reason in reasons]


@contextmanager
def translated(service: str, what: str) -> Iterator[None]:
    """Raise botocore's errors as Remuda's. `what` is the table, queue or operation of the call.

    Arguments that botocore rejects are a bug in Remuda and are raised unchanged.
    """
    try:
        yield
    except boto.ParamValidationError:
        raise
    except FAILURES as error:
        raise translate(error, service, what) from error


@contextmanager
def checked_settings(service: str) -> Iterator[None]:
    """For the creation of a client, which raises `ValueError` for an invalid endpoint or region."""
    try:
        with translated(service, service):
            yield
    except ValueError as error:
        raise UserError(f"{service} cannot be called: {error}", fix="check AWS_ENDPOINT_URL and AWS_REGION") from error


def translate(error: Exception, service: str, what: str) -> RemudaError:
    """The error to raise. It quotes the service's message, never the request or a credential."""
    if not isinstance(error, boto.ClientError):
        return _from_library(error, service, what)
    code, message = code_of(error), message_of(error)
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    # A 5xx status is temporary whatever its code. EC2 also returns 5xx with codes of the other categories.
    if status >= 500 and category_of(code) in {ErrorCategory.INPUT, ErrorCategory.OTHER}:
        return Unavailable(_refusal(service, what, code, message))
    return _service_specific(code, message, service, what) or _by_category(code, message, service, what)


def _service_specific(code: str, message: str, service: str, what: str) -> RemudaError | None:
    """The error for codes that have a special meaning for one service."""
    if service == DYNAMODB and code == TABLE_MISSING:
        return no_table(what)
    if service == DYNAMODB and code == VALIDATION:
        # Remuda's expressions are valid, so the table has other keys or indexes.
        return UserError(f"table {what} is not usable as a Remuda store: {message}", fix=_TABLE_FIX)
    if service == SQS and code in _QUEUE_KEY_THROTTLED:
        return _throttled(service, what, code)
    if service == SQS and code.startswith(_QUEUE_KEY):
        return UserError(_refusal(service, what, code, message), field="aws-permission", fix=_QUEUE_KEY_FIX)
    if code in QUEUE_MISSING:
        return NotFound(f"no queue {what} in SQS", fix=_TABLE_FIX)
    if code in _QUEUE_JUST_DELETED:
        return Unavailable(
            f"queue {what} was deleted less than a minute ago: {message}", fix="run remuda refresh in a minute"
        )
    if code in _WRONG_INSTANCE_STATE:
        return UserError(
            _refusal(service, what, code, message), field="instance", fix="check the instance in the EC2 console"
        )
    if code.startswith("InvalidInstanceID."):
        return NotFound(_refusal(service, what, code, message))
    return None


def _by_category(code: str, message: str, service: str, what: str) -> RemudaError:
    text, fix = _refusal(service, what, code, message), fix_of(code)
    match category_of(code):
        case ErrorCategory.THROTTLED:
            return _throttled(service, what, code)
        case ErrorCategory.PERMISSION:
            return UserError(text, field="aws-permission", fix=fix)
        case ErrorCategory.CREDENTIALS:
            return UserError(
                f"{service} refuses the AWS credentials ({what}): {code}: {message}",
                field="aws-credentials",
                fix=fix,
            )
        # Other services have the same codes for something else: SQS calls an operation Unsupported.
        case ErrorCategory.QUOTA | ErrorCategory.CAPACITY if service == EC2:
            return CapacityError(text, fix=fix)
        case ErrorCategory.INPUT if service == EC2:
            return UserError(text, field="launch", fix=fix)
        case ErrorCategory.VERIFICATION:
            return Unavailable(text, fix=fix)
        case ErrorCategory.SERVER | ErrorCategory.OTHER if service == EC2:
            return Unavailable(text, fix=fix)
        case _:
            return Unavailable(text)


def _throttled(service: str, what: str, code: str) -> Throttled:
    return Throttled(f"{service} limits our calls ({what}): {code}", retry_after_s=RETRY_AFTER_S)


def _refusal(service: str, what: str, code: str, message: str) -> str:
    return f"{service} refuses ({what}): {code}: {message}".rstrip(": ")


def no_table(name: str) -> UserError:
    return UserError(f"no table {name} in DynamoDB", fix=_TABLE_FIX)


def wrong_table(name: str, differences: list[str]) -> UserError:
    return UserError(
        f"table {name} is not a Remuda store: {'; '.join(differences)}",
        fix="choose another pool name, or delete that table",
    )


def _from_library(error: Exception, service: str, what: str) -> RemudaError:
    if isinstance(error, _NO_CREDENTIALS):
        return UserError(
            f"{service} needs AWS credentials: {error}",
            field="aws-credentials",
            fix="set AWS credentials, a profile or a role",
        )
    if isinstance(error, UnsendableRequest):
        return UserError(
            f"{service} cannot be called ({what}): {error}",
            field="aws-credentials",
            fix="set AWS credentials without a line break or a blank, and check AWS_ENDPOINT_URL",
        )
    if isinstance(error, _SETTINGS):
        return UserError(f"{service} cannot be called: {error}", fix="set AWS_REGION")
    endpoint = getattr(error, "kwargs", {}).get("endpoint_url", "")
    at = f"{service} at {endpoint}" if endpoint else service
    if isinstance(error, _TIMEOUTS):
        return TimedOut(f"{at} did not answer in time ({what})")
    if isinstance(error, UnreadableResponse):
        return Unavailable(f"the response of {at} cannot be parsed ({what})")
    if isinstance(error, boto.EndpointConnectionError):
        return Unavailable(f"{at} cannot be reached ({what})")
    return Unavailable(f"the connection to {at} failed ({what}): {type(error).__name__}")


async def await_response(call: Awaitable[T]) -> T:
    """Await one call of botocore's client. Its failures in HTTP and in its parsers raise `UnreadableResponse`."""
    try:
        return await call
    except Exception as error:
        if isinstance(error, FAILURES) or not _is_library_failure(error):
            raise
        raise UnreadableResponse(error=type(error).__name__) from error


def _is_library_failure(error: Exception) -> bool:
    """Whether a user of a parsed response raised the error, or a parser took part, or it is one of aiohttp."""
    # Outermost frame first: the last module raised the error.
    modules = [str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(error.__traceback__)]
    is_http = any(each.__module__.startswith("aiohttp.") for each in type(error).__mro__)
    return is_http or modules[-1].startswith(_PARSER_USERS) or not _PARSERS.isdisjoint(modules)


async def await_and_count(call: Awaitable[T], calls: CallCounter, service: str, operation: str) -> T:
    """Await one call and count its HTTP requests, including retries."""
    # Values if the call is cancelled or raises an unexpected error.
    requests, failed = 1, 0
    try:
        answer = await call
    except FAILURES as error:
        requests = failed = requests_of(error.response) if isinstance(error, boto.ClientError) else 1
        if isinstance(error, boto.ClientError) and code_of(error) in _EXPECTED_CODES:
            # The last request was answered; only those before it failed.
            failed -= 1
        raise
    else:
        requests = requests_of(answer)
        failed = requests - 1
        return answer
    finally:
        calls.add(service, operation, requests)
        calls.fail(service, operation, failed)


def requests_of(response: Any) -> int:
    """Number of HTTP requests that botocore sent for one response."""
    return 1 + int(response.get("ResponseMetadata", {}).get("RetryAttempts", 0))


async def gather(calls: Iterable[Awaitable[T]]) -> list[T]:
    """Await calls concurrently and return their results in order.

    Unlike `asyncio.gather`, it raises the first error only after every call has finished.
    """
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]


def chunks(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
