"""What AWS, botocore and the network say, as Remuda's errors: the one place that knows their codes.

An answer that was lost (`TimedOut`, `Unavailable`) may have been a yes: callers of conditional writes read and see.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import aiohttp
from botocore import exceptions as boto
from botocore.parsers import ResponseParserError

from remuda.domain.errors import NotFound, RemudaError, Throttled, TimedOut, Unavailable, UserError

#: How much of a service's own words an error repeats.
MAX_SAID = 300
#: How long a service that throttles after all of botocore's own retries is left alone.
RETRY_AFTER_S = 1.0

CONDITION_FAILED = "ConditionalCheckFailedException"
TABLE_MISSING = "ResourceNotFoundException"
TABLE_BUSY = "ResourceInUseException"
VALIDATION = "ValidationException"
#: The first is what SQS says by its older protocol, and the newer one keeps it for compatibility.
QUEUE_MISSING = frozenset({"AWS.SimpleQueueService.NonExistentQueue", "QueueDoesNotExist"})

_THROTTLED = frozenset(
    {
        "ProvisionedThroughputExceededException",
        "RequestLimitExceeded",
        "RequestThrottled",
        "RequestThrottledException",
        "SlowDown",
        "Throttling",
        "ThrottlingException",
        "ThrottledException",
        "TooManyRequestsException",
    }
)
DENIED = frozenset({"AccessDenied", "AccessDeniedException", "KmsAccessDenied", "UnauthorizedOperation"})
_BAD_CREDENTIALS = frozenset(
    {
        "AuthFailure",
        "ExpiredToken",
        "ExpiredTokenException",
        "IncompleteSignature",
        "InvalidAccessKeyId",
        "InvalidClientTokenId",
        "InvalidSignatureException",
        "MissingAuthenticationToken",
        "MissingAuthenticationTokenException",
        "OptInRequired",
        "RequestExpired",
        "SignatureDoesNotMatch",
        "UnrecognizedClientException",
    }
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


def code_of(error: boto.ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


def item_of(error: boto.ClientError) -> dict[str, Any] | None:
    """The item that made a condition fail: it came with the refusal."""
    item: dict[str, Any] | None = error.response.get("Item")  # type: ignore[assignment]
    return item or None


def attempts_of(response: Any) -> int:
    """How many requests went over the wire for one answer."""
    return 1 + int(response.get("ResponseMetadata", {}).get("RetryAttempts", 0))


@contextmanager
def translated(service: str, resource: str) -> Iterator[None]:
    """Errors of botocore leave as Remuda's. `resource` is the table, queue, … that the call is about.

    Arguments that botocore itself refuses are a bug and leave as they are.
    """
    try:
        yield
    except boto.ParamValidationError:
        raise
    except boto.ClientError as error:
        raise from_client_error(error, service, resource) from error
    except (boto.BotoCoreError, ResponseParserError, aiohttp.ClientError, OSError) as error:
        raise _from_library(error, service) from error


@contextmanager
def settings_checked(service: str) -> Iterator[None]:
    """For the opening of a client, which says `ValueError` of an endpoint or a region that cannot be one."""
    try:
        with translated(service, service):
            yield
    except ValueError as error:
        raise UserError(f"{service} cannot be called: {error}", fix="check AWS_ENDPOINT_URL and AWS_REGION") from error


def from_client_error(error: boto.ClientError, service: str, resource: str) -> RemudaError:
    code = code_of(error)
    said = str(error.response.get("Error", {}).get("Message", ""))[:MAX_SAID]
    if code in _THROTTLED:
        return Throttled(f"{service} asks for fewer calls: {code}", retry_after_s=RETRY_AFTER_S)
    if code in DENIED:
        return UserError(f"{service} does not allow this: {said or code}", fix="give the role that permission")
    if code in _BAD_CREDENTIALS:
        return UserError(f"{service} refuses the AWS credentials: {code}", fix="give valid AWS credentials")
    if code in QUEUE_MISSING:
        return no_queue(resource)
    if code == TABLE_MISSING:
        return no_table(resource)
    return Unavailable(f"{service} cannot serve {resource} now: {code} {said}".rstrip())


def no_table(name: str) -> UserError:
    return UserError(f"no table {name} in DynamoDB", fix="run remuda refresh, or check the region and the pool's name")


def wrong_table(name: str, differences: list[str]) -> UserError:
    return UserError(
        f"table {name} is not a Remuda store: {'; '.join(differences)}", fix="name another pool, or remove that table"
    )


def no_queue(name: str) -> NotFound:
    missing = NotFound(f"no queue {name} in SQS")
    missing.fix = "run remuda refresh, or check the region and the pool's name"
    return missing


def _from_library(error: Exception, service: str) -> RemudaError:
    if isinstance(error, _NO_CREDENTIALS):
        return UserError(f"{service} needs AWS credentials: {error}", fix="set AWS credentials, a profile or a role")
    if isinstance(error, _SETTINGS):
        return UserError(f"{service} cannot be called: {error}", fix="set AWS_REGION")
    where = getattr(error, "kwargs", {}).get("endpoint_url", "")
    at = f"{service} at {where}" if where else service
    if isinstance(error, _TIMEOUTS):
        return TimedOut(f"{at} did not answer in time")
    if isinstance(error, boto.EndpointConnectionError):
        return Unavailable(f"{at} cannot be reached")
    return Unavailable(f"the connection to {at} failed: {type(error).__name__}")
