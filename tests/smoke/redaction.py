"""Redaction of recorded requests and answers: no credential, account, address or name of the user remains.

Every value is replaced by one of the same form, always by the same one, so that recordings still fit together.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import ipaddress
import json
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import date, datetime
from typing import Any
from urllib.parse import quote as url_quote
from urllib.parse import unquote

#: Names of values that are replaced as a whole, whatever they contain.
SENSITIVE = re.compile(
    r"token(?!\.actions\.githubusercontent)|secret(?!smanager)|passw|credential|jit|private.?key|signature|authorization|cookie|user.?data|session|"
    r"access.?key",
    re.IGNORECASE,
)
#: Shorter values are words, numbers and flags; replacing them everywhere would destroy the recording.
MIN_SECRET_CHARS = 8
#: Keys of a name and of its value, in lists of pairs.
_PAIR_NAMES, _PAIR_VALUES = ("Name", "Key", "ParameterKey", "name", "key"), ("Value", "ParameterValue", "value")
_ASSIGNMENT = re.compile(rf"((?:[\w.-]*(?:{SENSITIVE.pattern})[\w.-]*)\s*[=:]\s*)([^\s&,;\"'}}]+)", re.IGNORECASE)
#: A part of a URL with encoded characters.
_URL_ENCODED = re.compile(r"[\w.~%+-]*%[0-9A-Fa-f]{2}[\w.~%+-]*")
_KEPT_ADDRESSES = {"0.0.0.0", "127.0.0.1", "169.254.169.254", "::", "::1"}  # noqa: S104 - compared, not bound
_OCTETS = r"\d{1,3}(?:\.\d{1,3}){3}"
_FORMS = {
    "pem": r"-----BEGIN [A-Z ]+-----.*?-----END [A-Z ]+-----",
    "jwt": r"eyJ[\w-]{4,}\.[\w-]+(?:\.[\w-]*)?",
    "github": r"(?:gh[pousr]_|github_pat_)\w{10,}",
    "access_key": r"(?:AKIA|ASIA|AROA|AIDA|AGPA|AIPA|ANPA|ANVA|APKA|ABIA|ACCA)[A-Z0-9]{12,}",
    "email": r"[\w.+-]+@[\w-]+(?:\.[\w-]+)*\.[A-Za-z]{2,}",
    "id": r"\b(?:i|vpc|subnet|sg|sgr|eni|vol|lt|fleet|igw|rtb|rtbassoc|sir|eipalloc|eipassoc|snap|ami|nat|acl|dopt|r)"
    r"-(?:[0-9a-f]{17}|[0-9a-f]{8})\b",
    "host": r"\b(?:ip|ec2)-\d{1,3}(?:-\d{1,3}){3}\b",
    "ipv4": rf"(?<![\d.]){_OCTETS}(?![\d.])",
    "ipv6": r"(?<![\w:.])(?=[0-9a-fA-F]*:[0-9a-fA-F]*:)[0-9a-fA-F:]{3,39}(?![\w:.])",
    "account": r"(?<!\d)\d{12}(?!\d)",
    "opaque": r"[A-Za-z0-9+/_=-]{32,}",
}


def _one_of(forms: Mapping[str, str]) -> re.Pattern[str]:
    # Without forms, a pattern that matches nothing.
    return re.compile("|".join(f"(?P<{name}>{form})" for name, form in forms.items() if form) or r"(?!)", re.DOTALL)


_ANY_FORM = _one_of(_FORMS)


class Redactor:
    """`learn` all documents first, then `redact` each: a secret may appear before the field that names it."""

    def __init__(self, *, key: bytes, secrets: Iterable[str] = (), names: Mapping[str, str] | None = None) -> None:
        self._key = key
        self._secrets = {each for each in secrets if each}
        #: Names of the user, such as owner and repository, and their replacements.
        self._names = dict(names or {})
        self._known: re.Pattern[str] | None = None

    # Secrets --------------------------------------------------------------------------------------------------------

    def learn(self, document: Any) -> None:
        self._learn(document, is_secret=False)
        self._known = None

    def _learn(self, value: Any, *, is_secret: bool) -> None:
        if isinstance(value, Mapping):
            pair = _is_sensitive_pair(value)
            for key, item in value.items():
                inside = is_secret or _is_sensitive(key) or (pair and key in _PAIR_VALUES)
                self._learn(item, is_secret=inside)
        elif isinstance(value, list | tuple):
            for item in value:
                self._learn(item, is_secret=is_secret)
        elif isinstance(value, bytes):
            self._learn(value.decode("utf-8", "replace"), is_secret=is_secret)
        elif isinstance(value, str):
            nested = _nested(value)
            if nested is not None:
                self._learn(nested, is_secret=is_secret)
            if is_secret and len(value) >= MIN_SECRET_CHARS:
                self._secrets.add(value)
            for found in _ASSIGNMENT.finditer(value):
                if len(found[2]) >= MIN_SECRET_CHARS:
                    self._secrets.add(found[2])

    # Documents ------------------------------------------------------------------------------------------------------

    def redact(self, document: Any) -> Any:
        """The document as JSON types, without secrets."""
        return self._redact(document, is_secret=False)

    def _redact(self, value: Any, *, is_secret: bool) -> Any:
        if isinstance(value, Mapping):
            pair = _is_sensitive_pair(value)
            return {
                self.text(str(key)): self._redact(
                    item, is_secret=is_secret or _is_sensitive(key) or (pair and key in _PAIR_VALUES)
                )
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._redact(item, is_secret=is_secret) for item in value]
        if isinstance(value, bytes | bytearray):
            value = bytes(value).decode("utf-8", "replace")
        if isinstance(value, datetime | date):
            return value.isoformat()
        if not isinstance(value, str):
            if value is None or isinstance(value, bool):
                return value
            # A number may be an account.
            return int(self.text(str(value))) if isinstance(value, int) else value
        if is_secret and value:
            return self._pseudonym("secret", value)
        nested = _nested(value)
        if nested is not None:
            return json.dumps(self._redact(nested, is_secret=False))
        return self.text(value)

    def text(self, text: str) -> str:
        return self._plain(_URL_ENCODED.sub(self._encoded, text))

    def _encoded(self, found: re.Match[str]) -> str:
        decoded = unquote(found.group())
        redacted = self._plain(decoded)
        return found.group() if redacted == decoded else url_quote(redacted, safe="")

    def _plain(self, text: str) -> str:
        text = _ASSIGNMENT.sub(lambda found: found[1] + self._pseudonym("secret", found[2]), text)
        if self._known is None:
            self._known = self._compile_known()
        # Known values first: a longer text of another form may contain them.
        return _ANY_FORM.sub(self._replace, self._known.sub(self._replace, text))

    # Replacements ---------------------------------------------------------------------------------------------------

    def _compile_known(self) -> re.Pattern[str]:
        known = {form for secret in self._secrets for form in _spellings(secret)}
        words = "|".join(re.escape(each) for each in sorted(known, key=len, reverse=True))
        names = "|".join(
            rf"(?<![\w-]){re.escape(each)}(?![\w-])" for each in sorted(self._names, key=len, reverse=True)
        )
        return _one_of({"known": words, "name": names})

    def _replace(self, found: re.Match[str]) -> str:
        kind, text = str(found.lastgroup), found.group()
        if kind == "name":
            return self._names[text]
        return _REPLACEMENTS.get(kind, _secret)(self, text)

    def digest(self, kind: str, text: str) -> bytes:
        return hmac.new(self._key, f"{kind}:{text}".encode(), hashlib.sha256).digest()

    def _pseudonym(self, kind: str, text: str) -> str:
        return f"<{kind} {self.digest(kind, text).hex()[:8]}>"


def _is_sensitive(key: Any) -> bool:
    return SENSITIVE.search(str(key)) is not None


def _is_sensitive_pair(value: Mapping[Any, Any]) -> bool:
    """Whether it is a name and a value, and the name is that of a secret."""
    return any(isinstance(value.get(name), str) and _is_sensitive(value[name]) for name in _PAIR_NAMES)


def _nested(text: str) -> Any:
    """The document that a text contains, or None."""
    if text[:1] not in {"{", "["}:
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _spellings(secret: str) -> set[str]:
    """A secret as it appears in texts: plain, in JSON, in URLs, and the middle of its base64 forms."""
    forms = {secret, json.dumps(secret)[1:-1], url_quote(secret, safe="")}
    raw = secret.encode()
    for offset in range(3):
        encoded = base64.b64encode(b"\0" * offset + raw).decode()
        # The characters that depend only on the secret.
        middle = encoded[4 if offset else 0 : len(encoded) // 4 * 4 - 4]
        if len(middle) >= MIN_SECRET_CHARS:
            forms |= {middle, middle.replace("+", "-").replace("/", "_")}
    return forms


def _secret(redactor: Redactor, text: str) -> str:
    return redactor._pseudonym("secret", text)


def _opaque(redactor: Redactor, text: str) -> str:
    """Long texts that look random are replaced; names and paths are words."""
    has = [any(map(test, text)) for test in (str.isupper, str.islower, str.isdigit)]
    is_hex = re.fullmatch(r"[0-9a-f-]+|[0-9A-F-]+", text) is not None
    return redactor._pseudonym("opaque", text) if all(has) or is_hex or not has[1] else text


def _id(redactor: Redactor, text: str) -> str:
    kind, _, value = text.partition("-")
    return f"{kind}-{redactor.digest('id', text).hex()[: len(value)]}"


def _account(redactor: Redactor, text: str) -> str:
    number = int.from_bytes(redactor.digest("account", text)[:8], "big")
    return str(10**11 + number % (9 * 10**11))


def _ipv4(redactor: Redactor, text: str) -> str:
    """An address of 198.18.0.0/15, which is for tests of networks (RFC 2544)."""
    if text in _KEPT_ADDRESSES:
        return text
    try:
        ipaddress.IPv4Address(text)
    except ValueError:
        return text
    first, second, third = redactor.digest("ipv4", text)[:3]
    return f"198.{18 + first % 2}.{second}.{third}"


def _host(redactor: Redactor, text: str) -> str:
    kind, *octets = text.split("-")
    return "-".join([kind, *_ipv4(redactor, ".".join(octets)).split(".")])


def _ipv6(redactor: Redactor, text: str) -> str:
    """An address of 2001:db8::/32, which is for documentation (RFC 3849)."""
    try:
        address = ipaddress.IPv6Address(text)
    except ValueError:
        return text
    if str(address) in _KEPT_ADDRESSES:
        return text
    return f"2001:db8::{redactor.digest('ipv6', text).hex()[:4]}"


def _email(redactor: Redactor, text: str) -> str:
    return f"user-{redactor.digest('email', text).hex()[:8]}@example.com"


_REPLACEMENTS: Mapping[str, Callable[[Redactor, str], str]] = {
    "account": _account,
    "email": _email,
    "host": _host,
    "id": _id,
    "ipv4": _ipv4,
    "ipv6": _ipv6,
    "opaque": _opaque,
}
