"""Requests and documents of the query protocols, compared with botocore's serializers and parsers."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qs
from xml.sax.saxutils import escape

import botocore.session
import pytest
from botocore.model import ListShape, Shape, StructureShape
from botocore.parsers import create_parser
from botocore.serialize import create_serializer

from aws_shapes import OPERATIONS, text
from remuda.adapters.aws.clients import PROTOCOLS
from remuda.adapters.aws.protocols import SHAPES, JsonProtocol
from remuda.http import ClientResponse

#: Depth at which recursive shapes end.
MAX_DEPTH = 12
CASES = [(service, operation) for service, operations in OPERATIONS.items() for operation in operations]


@pytest.fixture(scope="module")
def session() -> Any:
    return botocore.session.get_session()


def test_shapes_are_those_of_botocore():
    assert SHAPES.read_text() == text(), "run make docs"


def sample(shape: Shape, depth: int = 0) -> Any:
    """A value with every member of the shape, and two elements in each list."""
    if isinstance(shape, StructureShape):
        return {name: sample(each, depth + 1) for name, each in shape.members.items() if depth < MAX_DEPTH}
    if isinstance(shape, ListShape):
        return [sample(shape.member, depth + 1), sample(shape.member, depth + 1)]
    match shape.type_name:
        case "boolean":
            return True
        case "integer" | "long":
            return 7
        case "float" | "double":
            return 1.5
        case "timestamp":
            return datetime(2026, 11, 17, 12, 0, 1, tzinfo=UTC)
        case _:
            return f"a <b> & {shape.name} ü"


def xml(shape: Shape, value: Any) -> str:
    """The elements with which the service returns this value."""
    if isinstance(shape, StructureShape):
        return "".join(
            f"<{name}>{xml(shape.members[member], each)}</{name}>"
            for member, each in value.items()
            for name in [shape.members[member].serialization.get("name", member)]
        )
    if isinstance(shape, ListShape):
        name = shape.member.serialization.get("name", "member")
        return "".join(f"<{name}>{xml(shape.member, each)}</{name}>" for each in value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, datetime):
        return f"{value:%Y-%m-%dT%H:%M:%S}.000Z"
    return escape(str(value))


@pytest.mark.parametrize(("service", "operation"), CASES)
def test_request_equals_that_of_botocore(session: Any, service: str, operation: str):
    model = session.get_service_model(service)
    shape = model.operation_model(operation).input_shape
    parameters = sample(shape) if shape else {}
    serializer = create_serializer(model.metadata["protocol"], include_validation=False)
    expected = serializer.serialize_to_request(parameters, model.operation_model(operation))
    headers, body = PROTOCOLS[service]().request(operation, parameters)
    assert headers["content-type"] == expected["headers"]["Content-Type"]
    sent = {name: value for name, (value,) in parse_qs(body.decode(), keep_blank_values=True).items()}
    assert sent == {name: str(value) for name, value in expected["body"].items()}


@pytest.mark.parametrize(("service", "operation"), CASES)
def test_document_equals_that_of_botocore(session: Any, service: str, operation: str):
    model = session.get_service_model(service)
    shape = model.operation_model(operation).output_shape
    result = xml(shape, sample(shape)) if shape else ""
    if model.metadata["protocol"] == "query":
        metadata = "<ResponseMetadata><RequestId>r-1</RequestId></ResponseMetadata>"
        result = f"<{operation}Result>{result}</{operation}Result>{metadata}"
    else:
        result = f"<requestId>r-1</requestId>{result}"
    body = f'<{operation}Response xmlns="http://example.com/doc/">{result}</{operation}Response>'.encode()
    document = PROTOCOLS[service]().document(operation, ClientResponse(200, {}, body))
    parser = create_parser(model.metadata["protocol"])
    expected = parser.parse({"status_code": 200, "headers": {}, "body": body}, shape)
    assert document.pop("requestId") == expected.pop("ResponseMetadata")["RequestId"] == "r-1"
    assert document == expected


@pytest.mark.parametrize("service", ["ec2", "iam"])
@pytest.mark.parametrize(
    ("status", "body", "code"),
    [
        (400, b"<Response><Errors><Error><Code>A</Code><Message>m</Message></Error></Errors></Response>", "A"),
        (
            404,
            b"<ErrorResponse><Error><Code>NoSuchEntity</Code><Message>m</Message></Error></ErrorResponse>",
            "NoSuchEntity",
        ),
        (503, b"<html>busy", "503"),
        (500, b"", "500"),
    ],
)
def test_error_of_a_query_protocol(service: str, status: int, body: bytes, code: str):
    error = PROTOCOLS[service]().error(ClientResponse(status, {}, body))
    assert error["Error"]["Code"] == code


@pytest.mark.parametrize("body", [b"", b"<html>", b"<html/>", b"<OtherResponse/>"])
def test_other_documents_are_not_taken_for_an_empty_list(body: bytes):
    with pytest.raises(ValueError):
        PROTOCOLS["ec2"]().document("DescribeInstances", ClientResponse(200, {}, body))


def test_unknown_member_of_a_request_is_a_bug():
    with pytest.raises(KeyError):
        PROTOCOLS["ec2"]().request("DescribeInstances", {"Instances": ["i-1"]})


@pytest.mark.parametrize(
    ("headers", "body", "code"),
    [
        ({}, {"__type": "com.amazonaws.dynamodb.v20120810#ThrottlingException"}, "ThrottlingException"),
        ({"x-amzn-errortype": "AccessDeniedException:http://x/"}, {}, "AccessDeniedException"),
        (
            {"x-amzn-query-error": "AWS.SimpleQueueService.NonExistentQueue;Sender"},
            {"__type": "com.amazonaws.sqs#QueueDoesNotExist"},
            "AWS.SimpleQueueService.NonExistentQueue",
        ),
        ({}, [], "400"),
    ],
)
def test_code_of_a_json_error(headers: dict[str, str], body: Any, code: str):
    error = JsonProtocol(prefix="X", version="1.0").error(ClientResponse(400, headers, json.dumps(body).encode()))
    assert error["Error"]["Code"] == code
