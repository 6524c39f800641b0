"""IAM policies and statements, and the replacement of their placeholders."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: Operator to condition key to accepted values.
Conditions = Mapping[str, Mapping[str, str | Sequence[str]]]
Document = dict[str, Any]

VERSION = "2012-10-17"


@dataclass(frozen=True, kw_only=True, slots=True)
class Statement:
    sid: str
    #: For the reference.
    purpose: str
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
    #: Who has the policy, for the reference.
    holder: str
    statements: tuple[Statement, ...]

    def document(self) -> Document:
        return {"Version": VERSION, "Statement": [statement.document() for statement in self.statements]}


def render(value: Any, text: Callable[[str], Any]) -> Any:
    """The document with `text` applied to every string that is not a key."""
    if isinstance(value, str):
        return text(value)
    if isinstance(value, Mapping):
        return {key: render(item, text) for key, item in value.items()}
    return [render(item, text) for item in value]


def fill_placeholders(
    policy: Policy,
    *,
    pool: str = "<pool>",
    account: str = "<account>",
    region: str = "<region>",
    partition: str = "aws",
    environment: str = "<environment>",
    credential: str = "<github-credential>",
    volume_key: str = "<volume-kms-key>",
    image_key: str = "<image-kms-key>",
    role_path: str = "/",
) -> Document:
    values = {
        "<pool>": pool,
        "<account>": account,
        "<region>": region,
        "<partition>": partition,
        "<environment>": environment,
        "<github-credential>": credential,
        "<volume-kms-key>": volume_key,
        "<image-kms-key>": image_key,
        "<role-path>": role_path,
    }

    def fill(text: str) -> str:
        for placeholder, value in values.items():
            text = text.replace(placeholder, value)
        return text

    document: Document = render(policy.document(), fill)
    return document
