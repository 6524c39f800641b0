"""OIDC tokens of workflows: accepted and rejected tokens, and the cache of the issuer's keys."""

from __future__ import annotations

import base64
import json
from datetime import UTC, datetime, timedelta
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import example, given
from hypothesis import strategies as st

from remuda.adapters.github import oidc
from remuda.adapters.github.oidc import (
    KEYS_LIFETIME_S,
    KEYS_MAX_AGE_S,
    LEEWAY_S,
    MAX_TOKEN,
    REFETCH_AFTER_S,
    IssuerKeys,
    TokenVerifier,
    parse_keys,
)
from remuda.domain.errors import Unavailable
from remuda.domain.workflow_identity import TokenRejected, parse_identity
from tests.support.oidc import ISSUER, KEY_ID, TokenIssuer, compact, jwk, rsa_key

AUDIENCE = "remuda-test"
NOW = datetime(2026, 6, 1, 12, 0, tzinfo=UTC)


class StoppedClock:
    def __init__(self) -> None:
        self.time = NOW

    def now(self) -> datetime:
        return self.time

    def monotonic(self) -> float:
        return 0.0

    async def sleep(self, seconds: float) -> None:
        self.time += timedelta(seconds=seconds)


class Verification:
    """An issuer, and a verifier with its own cache of the issuer's keys."""

    def __init__(self) -> None:
        self.issuer = TokenIssuer()
        self.clock = StoppedClock()
        keys = IssuerKeys(issuer=ISSUER, clock=self.clock, fetch=self.issuer.fetch)
        self.verifier = TokenVerifier(issuer=ISSUER, audience=AUDIENCE, clock=self.clock, keys=keys)

    async def verify(self, **changed: Any) -> Any:
        return await self.verifier.verify(self.issuer.token(self.clock.now(), **changed))

    async def message_of(self, token: str) -> str:
        """The sentence of the rejection, which does not contain the token."""
        with pytest.raises(TokenRejected) as raised:
            await self.verifier.verify(token)
        assert raised.value.fix
        assert not [part for part in token.split(".") if len(part) > 40 and part in repr(raised.value)]
        return raised.value.message

    async def rejected(self, **changed: Any) -> str:
        return await self.message_of(self.issuer.token(self.clock.now(), **changed))


@pytest.fixture
def subject() -> Verification:
    return Verification()


async def test_a_token_of_github_is_accepted(subject):
    identity = parse_identity(await subject.verify(environment="prod"))
    assert (identity.repository, identity.repository_id, identity.owner_id) == ("octo/repo", "74", "65")
    assert (identity.run_id, identity.run_attempt, identity.event) == ("123", 1, "push")
    assert (identity.environment, identity.token_id) == ("prod", "d6dc2f0c-7b34-4f6c-b1ce-4d3b7bc0f2a1")
    assert subject.issuer.fetched == [f"{ISSUER}/.well-known/jwks"]


async def test_headers_cannot_name_other_keys(subject):
    """They are ignored: the key comes from the issuer."""
    evil = rsa_key("evil")
    headers = {"jku": "https://evil.example/jwks", "x5u": "https://evil.example/x", "jwk": jwk(evil), "kid": KEY_ID}
    forged = jwt.encode(subject.issuer.claims(NOW), evil, algorithm="RS256", headers=headers)
    assert await subject.message_of(forged) == "the signature of the OIDC token is not valid"
    assert await subject.verify(headers={"jku": "https://evil.example/jwks"})
    assert set(subject.issuer.fetched) == {f"{ISSUER}/.well-known/jwks"}


@pytest.mark.parametrize(
    ("claims", "sentence"),
    [
        ({"aud": "sts.amazonaws.com"}, "the OIDC token is for 'sts.amazonaws.com', not for remuda-test"),
        ({"aud": [AUDIENCE]}, "the OIDC token is for ['remuda-test'], not for remuda-test"),
        ({"aud": None}, "the OIDC token is for None, not for remuda-test"),
        ({"iss": "https://evil.example"}, f"the OIDC token was issued by 'https://evil.example', not by {ISSUER}"),
        ({"iss": f"{ISSUER}/"}, f"the OIDC token was issued by '{ISSUER}/', not by {ISSUER}"),
        ({"iss": None}, f"the OIDC token was issued by None, not by {ISSUER}"),
        ({"exp": int(NOW.timestamp()) - 90}, "the OIDC token expired 90 s ago"),
        ({"exp": None}, "the claim exp of the OIDC token is None"),
        ({"nbf": int(NOW.timestamp()) + 90}, "the OIDC token is not valid yet: it begins in 90 s"),
        ({"iat": int(NOW.timestamp()) + 90}, "the OIDC token is not valid yet: it begins in 90 s"),
        ({"exp": "soon"}, "the claim exp of the OIDC token is 'soon'"),
        ({"exp": True}, "the claim exp of the OIDC token is True"),
    ],
)
async def test_tokens_for_others_or_other_times_are_rejected_without_a_request(subject, claims, sentence):
    header = {"alg": "RS256", "kid": KEY_ID}
    assert await subject.message_of(compact(header, subject.issuer.claims(NOW, **claims))) == sentence
    assert not subject.issuer.fetched


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-1", "1e400", "9" * 400])
async def test_times_beyond_all_limits_are_rejected(subject, number):
    body = json.dumps(subject.issuer.claims(NOW, exp=0)).replace('"exp": 0', f'"exp": {number}')
    token = compact({"alg": "RS256", "kid": KEY_ID}, body.encode())
    assert (await subject.message_of(token)).startswith("the claim exp of the OIDC token is ")


async def test_clocks_may_differ_a_little(subject):
    seconds = NOW.timestamp()
    assert await subject.verify(exp=seconds - LEEWAY_S + 1)
    assert await subject.verify(nbf=seconds + LEEWAY_S - 1, iat=seconds + LEEWAY_S - 1)


async def test_other_algorithms_are_rejected(subject):
    claims = subject.issuer.claims(NOW)
    public = base64.urlsafe_b64decode(jwk(rsa_key())["n"] + "==")
    headers = {"kid": KEY_ID}
    tokens = {
        "none": compact({"alg": "none", "kid": KEY_ID}, claims).rpartition(".")[0] + ".",
        # The classical attack: the public key as the key of an HMAC.
        "HS256": jwt.encode(claims, public, algorithm="HS256", headers=headers),
        "RS512": jwt.encode(claims, rsa_key(), algorithm="RS512", headers=headers),
        "PS256": jwt.encode(claims, rsa_key(), algorithm="PS256", headers=headers),
        "ES256": jwt.encode(claims, ec.generate_private_key(ec.SECP256R1()), algorithm="ES256", headers=headers),
    }
    for name, token in tokens.items():
        if name == "none":
            # Without a signature it has not even the form.
            assert await subject.message_of(token) == "the OIDC token is not a JWT"
            token += "eA"  # noqa: PLW2901
        expected = f"the OIDC token has the algorithm '{name}'; only RS256 is accepted"
        assert await subject.message_of(token) == expected
    assert not subject.issuer.fetched


@pytest.mark.parametrize(
    ("header", "sentence"),
    [
        ({"alg": "RS256"}, "the OIDC token does not name its key"),
        ({"alg": "RS256", "kid": 7}, "the OIDC token does not name its key"),
        ({"alg": ["RS256"], "kid": KEY_ID}, "the OIDC token has the algorithm ['RS256']; only RS256 is accepted"),
        ({"kid": KEY_ID}, "the OIDC token has the algorithm None; only RS256 is accepted"),
        ({"alg": "RS256", "kid": KEY_ID, "crit": ["exp"]}, "the OIDC token has an extension that is not supported"),
        ({"alg": "RS256", "kid": KEY_ID, "b64": False}, "the OIDC token has an extension that is not supported"),
    ],
)
async def test_unusable_headers_are_rejected(subject, header, sentence):
    assert await subject.message_of(compact(header, subject.issuer.claims(NOW))) == sentence


async def test_tampered_claims_are_rejected(subject):
    head, body, tail = subject.issuer.token(NOW).split(".")
    claims = json.loads(base64.urlsafe_b64decode(body + "=="))
    forged = compact({}, {**claims, "repository": "eve/repo"}).split(".")[1]
    assert await subject.message_of(f"{head}.{forged}.{tail}") == "the signature of the OIDC token is not valid"


async def test_a_token_has_only_one_form(subject):
    """The last character of a signature of 256 bytes has four unused bits."""
    token = subject.issuer.token(NOW)
    other = {"A": "B", "Q": "R", "g": "h", "w": "x"}[token[-1]]
    for same in (token[:-1] + other, f"{token}=", f"{token}==", token.replace(".", "=.", 1), f"{token}\n"):
        assert await subject.message_of(same) == "the OIDC token is not a JWT"
    assert await subject.verifier.verify(token)


async def test_long_tokens_are_rejected(subject):
    sentence = f"the OIDC token is not a JWT: it is longer than {MAX_TOKEN} characters"
    assert await subject.message_of("a" * (MAX_TOKEN + 1)) == sentence


@pytest.mark.parametrize(
    "token", ["", ".", "..", "a.b", "a.b.c.d", "e30.e30.e30", "W10.W10.e30", "é.é.é", "\ud800", "e30=.e30=.e30="]
)
async def test_texts_that_are_no_tokens_are_rejected(subject, token):
    assert (await subject.message_of(token)).startswith("the OIDC token ")


# Mutations ------------------------------------------------------------------------------------------------------------

TOKEN = TokenIssuer().token(NOW)


def _pyjwt_accepts(token: str) -> bool:
    """An independent verification, with the times of the test."""
    options: Any = {"verify_exp": False, "verify_nbf": False, "verify_iat": False}
    try:
        claims = jwt.decode(
            token,
            rsa_key().public_key(),
            algorithms=["RS256"],
            audience=AUDIENCE,
            issuer=ISSUER,
            options=options,
        )
    except (jwt.PyJWTError, ValueError, RecursionError):
        return False
    return bool(claims)


async def _outcome(token: str) -> str:
    try:
        await Verification().verifier.verify(token)
    except TokenRejected:
        return "rejected"
    return "accepted"


@given(st.integers(0, len(TOKEN) - 1), st.characters())
async def test_a_token_with_another_character_is_never_accepted(position, character):
    changed = TOKEN[:position] + character + TOKEN[position + 1 :]
    assert (await _outcome(changed) == "accepted") is (changed == TOKEN)


@given(st.integers(0, len(TOKEN)), st.integers(0, len(TOKEN)), st.text(max_size=8))
@example(0, 0, "")
async def test_a_token_with_another_part_is_never_accepted(start, end, inserted):
    changed = TOKEN[:start] + inserted + TOKEN[end:]
    assert (await _outcome(changed) == "accepted") is (changed == TOKEN)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from(["iss", "aud", "exp", "nbf", "iat", "repository", "run_id", "run_attempt", "event_name", "jti"])


@given(st.dictionaries(NAMES, JSON, min_size=1, max_size=3))
async def test_signed_claims_of_any_form_are_accepted_or_rejected(changed):
    """GitHub would not sign them, but nothing may fail in another way."""
    claims = {**TokenIssuer().claims(NOW), **changed}
    token = jwt.api_jws.encode(json.dumps(claims).encode(), rsa_key(), algorithm="RS256", headers={"kid": KEY_ID})
    try:
        identity = parse_identity(await Verification().verifier.verify(token))
    except TokenRejected:
        return
    assert _pyjwt_accepts(token)
    assert identity.run_id.isdecimal()


@given(
    st.dictionaries(st.sampled_from(["alg", "kid", "crit", "b64", "typ", "jwk"]), JSON), JSON, st.binary(max_size=300)
)
async def test_unsigned_tokens_of_any_form_are_rejected(header, claims, signature):
    token = compact({"alg": "RS256", "kid": KEY_ID, **header}, json.dumps(claims).encode(), signature)
    assert await _outcome(token) == "rejected"


@given(st.text())
async def test_any_text_is_rejected(text):
    assert await _outcome(text) == "rejected"


# Keys -----------------------------------------------------------------------------------------------------------------


async def test_keys_are_fetched_once_for_their_lifetime(subject):
    for _ in range(3):
        await subject.verify()
    await subject.clock.sleep(KEYS_LIFETIME_S - 1)
    await subject.verify()
    assert len(subject.issuer.fetched) == 1
    await subject.clock.sleep(1)
    await subject.verify()
    assert len(subject.issuer.fetched) == 2


async def test_a_new_key_of_the_issuer_is_found(subject):
    await subject.verify()
    fresh = rsa_key("fresh")
    subject.issuer.keys.append(jwk(fresh, "fresh"))
    await subject.clock.sleep(REFETCH_AFTER_S)
    token = jwt.encode(subject.issuer.claims(subject.clock.now()), fresh, algorithm="RS256", headers={"kid": "fresh"})
    assert await subject.verifier.verify(token)
    assert len(subject.issuer.fetched) == 2


async def test_unknown_keys_cause_at_most_one_request_per_minute(subject):
    sentence = f"the OIDC token is signed with a key that {ISSUER} does not publish"
    for _ in range(5):
        assert await subject.rejected(headers={"kid": "unknown"}) == sentence
    assert len(subject.issuer.fetched) == 1
    await subject.clock.sleep(REFETCH_AFTER_S)
    for _ in range(5):
        assert await subject.rejected(headers={"kid": "unknown"}) == sentence
    assert len(subject.issuer.fetched) == 2
    assert await subject.verify()
    assert len(subject.issuer.fetched) == 2


async def test_without_keys_the_caller_shall_try_again(subject):
    subject.issuer.failure = OSError("timed out")
    with pytest.raises(Unavailable, match=r"cannot be read from https://.*/jwks: 'timed out'") as raised:
        await subject.verify()
    assert raised.value.exit_code == 4
    assert raised.value.fix.startswith("try again")
    subject.issuer.failure = None
    assert await subject.verify()


async def test_known_keys_are_used_while_the_issuer_does_not_answer(subject):
    await subject.verify()
    subject.issuer.failure = OSError("timed out")
    await subject.clock.sleep(KEYS_LIFETIME_S)
    for _ in range(3):
        assert await subject.verify()
    assert len(subject.issuer.fetched) == 2
    with pytest.raises(TokenRejected):
        await subject.verify(headers={"kid": "unknown"})
    await subject.clock.sleep(REFETCH_AFTER_S)
    with pytest.raises(Unavailable):
        await subject.verify(headers={"kid": "unknown"})
    await subject.clock.sleep(KEYS_MAX_AGE_S)
    # Also right after a failed fetch.
    for _ in range(2):
        with pytest.raises(Unavailable):
            await subject.verify()


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{}", b'{"keys": 7}', b'{"keys": [7, {}, {"kid": 7}]}', b"<html>", b"\xff"]
)
async def test_answers_without_keys_are_failures(subject: Verification, body: bytes) -> None:
    async def fetch(_url: str) -> bytes:
        return body

    keys = IssuerKeys(issuer=ISSUER, clock=subject.clock, fetch=fetch)
    with pytest.raises(Unavailable):
        await keys.find(KEY_ID)


@pytest.mark.parametrize(
    "changed",
    [
        {"kty": "EC"},
        {"use": "enc"},
        {"alg": "RS512"},
        {"n": "AQAB"},
        {"n": None},
        {"e": ""},
        {"e": "not base64url!"},
        {"e": "Ag"},
        {"e": "AQ"},
        {"e": base64.urlsafe_b64encode(b"\xff" * 9).rstrip(b"=").decode()},
        {"n": base64.urlsafe_b64encode(b"\xff" * 2_000).rstrip(b"=").decode()},
    ],
)
def test_unsuitable_keys_are_left_out(changed):
    good = jwk(rsa_key("other"), "other")
    assert set(parse_keys(json.dumps({"keys": [jwk(rsa_key(), **changed), good]}).encode())) == {"other"}


def test_short_keys_are_left_out():
    with pytest.raises(ValueError, match="no RSA key"):
        parse_keys(json.dumps({"keys": [jwk(rsa_key("short", 1_024))]}).encode())


def test_optional_fields_of_keys():
    key = jwk(rsa_key())
    for name in ("use", "alg", "x5c", "x5t"):
        del key[name]
    assert set(parse_keys(json.dumps({"keys": [key]}).encode())) == {KEY_ID}


async def test_pyjwt_agrees_about_the_token():
    assert _pyjwt_accepts(TOKEN)
    assert await _outcome(TOKEN) == "accepted"
    assert oidc.ALGORITHM == "RS256"
