"""What a policy is made of, and how its placeholders are filled in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: Operator, then key, then the values that it takes.
Conditions = Mapping[str, Mapping[str, str | Sequence[str]]]
Document = dict[str, Any]

VERSION = "2012-10-17"


@dataclass(frozen=True, kw_only=True, slots=True)
class Statement:
    sid: str
    #: For the docs: what it is for, in a few words.
    why: str
    actions: tuple[str, ...]
    resources: tuple[str, ...]
    conditions: Conditions | None = None

    def document(self) -> Document:
        plain: Document = {
            "Sid": self.sid,
            "Effect": "Allow",
            "Action": list(self.actions),
            "Resource": list(self.resources),
        }
        if self.conditions:
            plain["Condition"] = {
                operator: {key: value if isinstance(value, str) else list(value) for key, value in keys.items()}
                for operator, keys in self.conditions.items()
            }
        return plain


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    name: str
    #: For the docs: who carries it.
    who: str
    statements: tuple[Statement, ...]

    def document(self) -> Document:
        return {"Version": VERSION, "Statement": [statement.document() for statement in self.statements]}


def render(value: Any, text: Callable[[str], Any]) -> Any:
    """The same document, every string in it but the keys through `text`."""
    if isinstance(value, str):
        return text(value)
    if isinstance(value, Mapping):
        return {key: render(item, text) for key, item in value.items()}
    return [render(item, text) for item in value]


def filled(
    policy: Policy,
    *,
    pool: str = "<pool>",
    account: str = "<account>",
    region: str = "<region>",
    partition: str = "aws",
    environment: str = "<environment>",
    credential: str = "<github-credential>",
) -> Document:
    given = {
        "<pool>": pool,
        "<account>": account,
        "<region>": region,
        "<partition>": partition,
        "<environment>": environment,
        "<github-credential>": credential,
    }

    def put(text: str) -> str:
        for placeholder, value in given.items():
            text = text.replace(placeholder, value)
        return text

    document: Document = render(policy.document(), put)
    return document
