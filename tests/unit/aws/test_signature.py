"""Signatures of requests, compared with AWS's test suite and with botocore's signer."""

from __future__ import annotations

import string
from datetime import UTC, datetime
from unittest.mock import patch

import pytest
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from hypothesis import given
from hypothesis import strategies as st

from remuda.adapters.aws.signature import AwsCredentials, sign

AT = "20150830T123600Z"
HOST = {"Host": "example.amazonaws.com"}
SECRET = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"
TOKEN = (
    "AQoDYXdzEPT//////////wEXAMPLEtc764bNrC9SAPBSM22wDOk4x4HIZ8j4FZTwdQWLWsKWHGBuFqwAeMicRXmxfpSPfIeoIYRqTflfKD8YUuwth"
    "Ax7mSEI/qkPpKPi/kMcGdQrmGdeehM4IC1NtBmUpp2wUE8phUZampKsburEDy0KPkyQDYwT7WZ0wq5VSXDvp75YU9HFvlRd8Tx6q6fE8YQcHNVXAk"
    "iY9q6d+xo0rKwT38xVqr7ZD0u0iPPkUL64lIZbqBAz+scqKmlzm8FDrypNC9Yjc8fPOLn9FX9KSYvKTr4rvx3iSIlTJabIQwj2ICCR/oLxBA=="
)
FORM = {"Content-Type": "application/x-www-form-urlencoded"}


@pytest.mark.parametrize(
    ("method", "headers", "body", "token", "signature"),
    [
        ("GET", {}, b"", "", "5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31"),
        ("POST", {}, b"", "", "5da7c1a2acd57cee7505fc6676e4e544621c30862966e37dddb68e92efbe5d6b"),
        ("POST", FORM, b"Param1=value1", "", "ff11897932ad3f4e8b18135d722051e5ac45fc38421b1da7b9d196a0fe09473a"),
        ("POST", {}, b"", TOKEN, "85d96828115b5dc0cfc3bd16ad9e210dd772bbebba041836c64533a82be05ead"),
    ],
    ids=["get-vanilla", "post-vanilla", "post-x-www-form-urlencoded", "post-sts-header-before"],
)
def test_signature_of_the_test_suite(method: str, headers: dict[str, str], body: bytes, token: str, signature: str):
    """The Signature Version 4 test suite, which AWS published with its general reference."""
    credentials = AwsCredentials(access_key="AKIDEXAMPLE", secret_key=SECRET, token=token)
    signed = sign(credentials, {**HOST, **headers}, body, service="service", region="us-east-1", at=AT, method=method)
    assert signed["authorization"].startswith(
        "AWS4-HMAC-SHA256 Credential=AKIDEXAMPLE/20150830/us-east-1/service/aws4_request, SignedHeaders="
    )
    assert signed["authorization"].endswith(f"Signature={signature}")


words = st.text(string.ascii_letters + string.digits + "/+=._-", min_size=1, max_size=40)


@given(
    secret=words,
    token=st.just("") | words,
    target=words,
    body=st.binary(max_size=200),
    region=st.sampled_from(["eu-central-1", "us-gov-west-1"]),
    path=st.sampled_from(["/", "/000000000000/queue"]),
)
def test_signature_equals_that_of_botocore(secret: str, token: str, target: str, body: bytes, region: str, path: str):
    headers = {"host": "sqs.example.com:4566", "content-type": "application/x-amz-json-1.0", "x-amz-target": target}
    signed = sign(
        AwsCredentials(access_key="AKID", secret_key=secret, token=token),
        headers,
        body,
        service="sqs",
        region=region,
        at=AT,
        path=path,
    )
    request = AWSRequest("POST", f"http://sqs.example.com:4566{path}", headers=dict(headers), data=body)
    with patch("botocore.auth.get_current_datetime", return_value=datetime(2015, 8, 30, 12, 36, tzinfo=UTC)):
        SigV4Auth(Credentials("AKID", secret, token or None), "sqs", region).add_auth(request)
    assert signed["authorization"] == request.headers["Authorization"]


def test_credentials_are_not_shown():
    shown = repr(AwsCredentials(access_key="AKID", secret_key="s3cret", token="t0ken"))
    assert "AKID" in shown
    assert "s3cret" not in shown
    assert "t0ken" not in shown
