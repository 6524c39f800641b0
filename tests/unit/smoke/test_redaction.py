"""Redaction of recordings: nothing that identifies the user or opens a door remains, and the rest fits together."""

from __future__ import annotations

import base64
import binascii
import contextlib
import json
import string
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.smoke.redaction import MIN_SECRET_CHARS, Redactor

KEY = b"key of this run"
ALPHANUMERIC = string.ascii_letters + string.digits


def _texts(alphabet: str, least: int, most: int) -> st.SearchStrategy[str]:
    return st.text(alphabet=alphabet, min_size=least, max_size=most)


def _base64url(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode().rstrip("=")


#: Values that are found by their form, wherever they are.
FORMS = {
    "account": st.from_regex(r"\A[0-9]{12}\Z"),
    "access key": st.from_regex(r"\A(AKIA|ASIA|AROA)[A-Z2-7]{16}\Z"),
    "classic token": _texts(ALPHANUMERIC, 36, 36).map("ghp_{}".format),
    "installation token": _texts(ALPHANUMERIC, 36, 40).map("ghs_{}".format),
    "fine-grained token": _texts(ALPHANUMERIC + "_", 40, 82).map("github_pat_{}".format),
    "jwt": st.lists(st.binary(min_size=20, max_size=60), min_size=2, max_size=2).map(
        lambda parts: (
            "eyJhbGciOiJSUzI1NiJ9." + ".".join(base64.urlsafe_b64encode(part).decode().rstrip("=") for part in parts)
        )
    ),
    "pem": st.binary(min_size=60, max_size=90).map(
        lambda raw: f"-----BEGIN RSA PRIVATE KEY-----\n{base64.b64encode(raw).decode()}\n-----END RSA PRIVATE KEY-----"
    ),
    "public address": st.ip_addresses(v=4, network="52.0.0.0/8").map(str),
    "private address": st.ip_addresses(v=4, network="10.0.0.0/8").map(str),
    "address in IPv6": st.ip_addresses(v=6, network="2600:1f18::/32").map(str),
    "host name": st.ip_addresses(v=4, network="10.0.0.0/8").map(lambda ip: f"ip-{str(ip).replace('.', '-')}"),
    "instance": st.from_regex(r"\Ai-[0-9a-f]{17}\Z"),
    "subnet": st.from_regex(r"\Asubnet-[0-9a-f]{17}\Z"),
    "e-mail": st.from_regex(r"\A[a-z]{3,8}@[a-z]{3,8}\.com\Z"),
}
#: Values that only their name betrays.
NAMES = st.sampled_from(
    ["token", "Token", "SecretString", "SecretAccessKey", "encoded_jit_config", "Authorization", "UserData", "password"]
)
ARBITRARY = _texts(ALPHANUMERIC + "+/=.-_~ ", MIN_SECRET_CHARS, 60).filter(
    lambda text: text.strip() == text and len(set(text)) > 3
)
#: Where a value can be found in a document.
PLACES = st.sampled_from(
    [
        lambda value: value,
        lambda value: {"Value": value},
        lambda value: [{"text": f"before {value} after"}],
        lambda value: {"url": f"https://example.com/?x={quote(value, safe='')}&y=1"},
        lambda value: json.dumps({"nested": {"deeper": [value]}}),
        lambda value: f"arn:aws:iam::{value}:role/x" if ":" not in value else f"[{value}]:80",
        lambda value: {f"key {value}": 1},
        lambda value: f"line\n{value}\nline".encode(),
    ]
)


def survives(value: str, document: Any) -> bool:
    text = json.dumps(document, ensure_ascii=False)
    once = json.dumps(value)[1:-1]
    return any(form in text for form in (value, once, json.dumps(once)[1:-1], quote(value, safe="")))


def redacted(*documents: Any, **options: Any) -> list[Any]:
    redactor = Redactor(key=KEY, **options)
    for document in documents:
        redactor.learn(document)
    return [redactor.redact(document) for document in documents]


@pytest.mark.parametrize("form", FORMS)
@settings(deadline=None)
@given(data=st.data())
def test_values_with_a_known_form_do_not_survive_anywhere(form, data):
    value = data.draw(FORMS[form])
    place = data.draw(PLACES)
    (document,) = redacted({"Result": place(value)})
    assert not survives(value, document), document


@settings(deadline=None)
@given(value=ARBITRARY, name=NAMES, place=PLACES)
def test_a_value_under_the_name_of_a_secret_does_not_survive_in_any_other_place(value, name, place):
    # The other place comes first: the secret is known only later.
    documents = redacted({"Result": place(value)}, {"Outer": {name: [{"S": value}]}})
    assert not any(survives(value, document) for document in documents), documents


@given(value=_texts(string.ascii_lowercase, 1, MIN_SECRET_CHARS - 1), name=NAMES)
def test_a_short_value_under_the_name_of_a_secret_does_not_survive_there(value, name):
    (document,) = redacted({name: value, "Items": [{"Key": name, "Value": value}]})
    assert document[name] != value
    assert document["Items"][0]["Value"] != value


@settings(deadline=None)
@given(value=ARBITRARY, place=PLACES)
def test_given_credentials_do_not_survive(value, place):
    (document,) = redacted(place(value), secrets=[value])
    assert not survives(value, document), document


@settings(deadline=None)
@given(value=_texts(ALPHANUMERIC, 20, 40), before=_texts(ALPHANUMERIC, 0, 4), after=_texts(ALPHANUMERIC, 0, 4))
def test_a_known_secret_does_not_survive_in_base64(value, before, after):
    encoded = base64.b64encode(f"{before}{value}{after}".encode()).decode()
    (document,) = redacted({"Payload": f"x {encoded} y"}, secrets=[value])
    shown = "".join(document["Payload"].split()[1:-1])
    assert encoded not in shown
    with contextlib.suppress(binascii.Error):
        assert value.encode() not in base64.b64decode(shown + "===", validate=False)


@pytest.mark.parametrize(
    "pair",
    [
        {"ParameterKey": "GithubToken", "ParameterValue": "not-by-form"},
        {"Key": "password", "Value": "not-by-form"},
        {"Name": "client_secret", "Value": "not-by-form"},
        "REMUDA_GITHUB_TOKEN=not-by-form",
        "https://example.com/download?X-Amz-Signature=not-by-form&x=1",
        "Authorization: not-by-form",
    ],
)
def test_pairs_and_assignments_are_redacted(pair):
    (document,) = redacted({"Items": [pair]})
    assert "not-by-form" not in json.dumps(document)


def test_the_same_value_has_the_same_replacement_everywhere_and_in_every_process():
    first, second = redacted(
        {"Arn": "arn:aws:iam::123456789012:role/x", "Ip": "10.1.2.3"},
        {"Account": "123456789012", "Number": 123456789012, "Host": "ip-10-1-2-3.ec2.internal"},
    )
    (again,) = redacted({"Account": "123456789012"})
    account = first["Arn"].split(":")[4]
    assert account != "123456789012"
    assert account.isdigit()
    assert len(account) == 12
    assert (second["Account"], second["Number"], again["Account"]) == (account, int(account), account)
    assert second["Host"] == f"ip-{first['Ip'].replace('.', '-')}.ec2.internal"
    assert Redactor(key=b"another run").redact("123456789012") != account


def test_harmless_values_stay_as_they_are():
    document = {
        "StackName": "remuda-smoke-1a2b3c4d",
        "Role": "arn:aws:iam::aws:policy/service-role/AWSLambdaBasicExecutionRole",
        "Issuer": "https://token.actions.githubusercontent.com",
        "token.actions.githubusercontent.com:aud": "sts.amazonaws.com",
        "Handler": "remuda.aws_lambda.broker.handler",
        "Cidr": "0.0.0.0/0",
        "Version": "2.336.0",
        "At": "2026-11-17T16:48:49+00:00",
        "Name": "/aws/service/canonical/ubuntu/server/24.04/stable/current/amd64/hvm/ebs-gp3/ami-id",
        "Count": 3,
        "Enabled": True,
        "Nothing": None,
    }
    assert redacted(document) == [document]


def test_names_of_the_user_are_replaced_as_words():
    names = {"octo/demo": "acme/app", "octo": "acme", "demo": "app"}
    (document,) = redacted({"Sub": "repo:octo/demo:ref:refs/heads/x", "Text": "octopus of octo"}, names=names)
    assert document == {"Sub": "repo:acme/app:ref:refs/heads/x", "Text": "octopus of acme"}
