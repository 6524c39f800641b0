"""Protocols of AWS services: operations to requests, responses to documents.

The JSON protocol needs no description of the operations. The query protocols, whose responses are XML, need one:
`shapes.json` contains that of the operations that Remuda uses, taken from botocore's models by `deploy/build.py`.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from typing import Protocol as TypingProtocol
from urllib.parse import urlencode

from botocore.exceptions import BotoCoreError

from remuda.http import ClientResponse

if TYPE_CHECKING:
    from xml.etree.ElementTree import Element

SHAPES = Path(__file__).with_name("shapes.json")


class UnreadableResponse(BotoCoreError):
    fmt = "the response cannot be parsed: {error}"


class UnsendableRequest(BotoCoreError):
    """The request was not sent, and would not be: a credential has a line break, for example."""

    fmt = "the request cannot be sent: {error}"


class Protocol(TypingProtocol):
    def request(self, operation: str, parameters: Mapping[str, Any]) -> tuple[Mapping[str, str], bytes]:
        """The headers and the body of a request."""
        ...

    def document(self, operation: str, response: ClientResponse) -> dict[str, Any]:
        """The document of a successful response. Raises `ValueError` if it cannot be read."""
        ...

    def error(self, response: ClientResponse) -> dict[str, Any]:
        """The document of an error, with `Error`: `Code` and `Message`."""
        ...


class JsonProtocol:
    """AWS JSON 1.0 and 1.1 (https://smithy.io/2.0/aws/protocols/aws-json-1_0-protocol.html)."""

    def __init__(self, *, prefix: str, version: str, is_query_compatible: bool = False) -> None:
        """`prefix`: the service in `X-Amz-Target`."""
        self._prefix = prefix
        self._headers = {"content-type": f"application/x-amz-json-{version}"}
        if is_query_compatible:
            # Errors have the codes of the former query protocol, in a header.
            self._headers["x-amzn-query-mode"] = "true"

    def request(self, operation: str, parameters: Mapping[str, Any]) -> tuple[Mapping[str, str], bytes]:
        body = json.dumps(parameters, separators=(",", ":"), default=_plain).encode()
        return {**self._headers, "x-amz-target": f"{self._prefix}.{operation}"}, body

    def document(self, operation: str, response: ClientResponse) -> dict[str, Any]:  # noqa: ARG002 - as in the protocol
        document = json.loads(response.body or b"{}")
        if not isinstance(document, dict):
            raise ValueError("the response is not a JSON object")
        return document

    def error(self, response: ClientResponse) -> dict[str, Any]:
        try:
            found = json.loads(response.body)
        except ValueError:
            found = None
        document: dict[str, Any] = found if isinstance(found, dict) else {}
        code = response.headers.get("x-amzn-errortype") or document.pop("__type", None) or document.get("code")
        # com.amazonaws.dynamodb.v20120810#ThrottlingException, or Name:http://...
        code = str(code or response.status).rpartition("#")[2].partition(":")[0]
        code = response.headers.get("x-amzn-query-error", "").partition(";")[0] or code
        message = document.get("message") or document.get("Message") or ""
        return {**document, "Error": {"Code": code, "Message": str(message)}}


def _plain(value: Any) -> Any:
    if isinstance(value, bytes | bytearray):
        return base64.b64encode(value).decode()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, set | frozenset | tuple):
        return list(value)
    raise TypeError(f"{type(value).__name__} cannot be sent to AWS")


# Query protocols ------------------------------------------------------------------------------------------------------


@cache
def _shapes() -> dict[str, Any]:
    shapes: dict[str, Any] = json.loads(SHAPES.read_text(encoding="utf-8"))
    return shapes


class QueryProtocol:
    """AWS query (https://smithy.io/2.0/aws/protocols/aws-query-protocol.html) and EC2's variant of it.

    A shape is the name of a scalar type, `{member: [name in XML, shape, name in requests]}` or
    `[shape of an element, name of an element in XML]`.
    """

    def __init__(self, service: str) -> None:
        self._service = service
        #: Whether an element of the response contains the result.
        self._has_result = service != "ec2"

    @cached_property
    def _model(self) -> dict[str, Any]:
        """Read at the first call: a warm provision does not call EC2."""
        model: dict[str, Any] = _shapes()[self._service]
        return model

    def request(self, operation: str, parameters: Mapping[str, Any]) -> tuple[Mapping[str, str], bytes]:
        shape = self._model["operations"][operation][0]
        fields = {"Action": operation, "Version": self._model["version"], **dict(self._fields(shape, parameters, ""))}
        return {"content-type": "application/x-www-form-urlencoded; charset=utf-8"}, urlencode(fields).encode()

    def _fields(self, shape: str, value: Any, prefix: str) -> Iterator[tuple[str, str]]:
        described = self._model["shapes"].get(shape, shape)
        if isinstance(described, dict):
            for name, item in value.items():
                if item is not None:
                    _, member, key = described[name]
                    yield from self._fields(member, item, f"{prefix}.{key}" if prefix else key)
        elif isinstance(described, list):
            for number, item in enumerate(value, 1):
                yield from self._fields(described[0], item, f"{prefix}.{number}")
        elif isinstance(value, bool):
            yield prefix, "true" if value else "false"
        elif isinstance(value, datetime):
            yield prefix, f"{value.astimezone(UTC).replace(tzinfo=None).isoformat()}Z"
        else:
            yield prefix, str(value)

    def document(self, operation: str, response: ClientResponse) -> dict[str, Any]:
        root = _parse_xml(response.body)
        if _tag(root) != f"{operation}Response":
            raise ValueError("another element was expected")
        result = _child(root, f"{operation}Result") if self._has_result else root
        shape = self._model["operations"][operation][1]
        document: dict[str, Any] = self._value(shape, result) if shape and result is not None else {}
        request_id = next((each.text for each in root.iter() if _tag(each).lower() == "requestid"), None)
        return {**document, "requestId": request_id or ""}

    def _value(self, shape: str, element: Element) -> Any:
        described = self._model["shapes"].get(shape, shape)
        if isinstance(described, dict):
            found = {_tag(child): child for child in element}
            return {
                name: self._value(member, found[key]) for name, (key, member, _) in described.items() if key in found
            }
        if isinstance(described, list):
            return [self._value(described[0], child) for child in element if _tag(child) == described[1]]
        return _scalar(described, element.text or "")

    def error(self, response: ClientResponse) -> dict[str, Any]:
        found: dict[str, str] = {}
        try:
            root = _parse_xml(response.body)
        except ValueError:
            root = None
        for each in root.iter() if root is not None else ():
            if _tag(each) in {"Code", "Message"}:
                found.setdefault(_tag(each), each.text or "")
        return {"Error": {"Code": found.get("Code") or str(response.status), "Message": found.get("Message", "")}}


def _parse_xml(body: bytes) -> Element:
    from xml.etree.ElementTree import ParseError, XMLParser  # noqa: PLC0415 - see below

    # A provision and a release with idle instances need no XML.
    parser = XMLParser()  # noqa: S314 - the server is AWS
    try:
        parser.feed(body)
        return parser.close()
    except ParseError as error:
        raise ValueError(f"not XML: {error}") from None


def _tag(element: Element) -> str:
    """The name without its namespace."""
    return str(element.tag).rpartition("}")[2]


def _child(element: Element, name: str) -> Element | None:
    return next((child for child in element if _tag(child) == name), None)


def _scalar(kind: str, text: str) -> Any:
    match kind:
        case "boolean":
            return text == "true"
        case "integer" | "long":
            return int(text)
        case "float" | "double":
            return float(text)
        case "timestamp":
            return datetime.fromisoformat(text)
        case _:
            return text
