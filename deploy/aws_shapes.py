"""Generator of `adapters/aws/shapes.json`: the operations that Remuda calls, taken from botocore's models."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import botocore.session
from botocore.model import ListShape, Shape, StructureShape

from remuda.adapters.aws.protocols import SHAPES

#: Operations of the query protocols, by service.
OPERATIONS: Mapping[str, tuple[str, ...]] = {
    "autoscaling": ("CompleteLifecycleAction",),
    "cloudformation": ("SignalResource",),
    "ec2": (
        "CreateFleet",
        "CreateLaunchTemplate",
        "CreateLaunchTemplateVersion",
        "CreateTags",
        "DeleteTags",
        "DescribeImages",
        "DescribeInstances",
        "DescribeLaunchTemplateVersions",
        "DescribeLaunchTemplates",
        "DescribeSecurityGroups",
        "DescribeSpotPriceHistory",
        "DescribeSubnets",
        "DescribeTags",
        "ModifyLaunchTemplate",
        "RunInstances",
        "TerminateInstances",
    ),
    "iam": ("GetInstanceProfile",),
    "sts": ("GetCallerIdentity",),
}


def shapes() -> dict[str, Any]:
    session = botocore.session.get_session()
    return {service: _service(session.get_service_model(service), names) for service, names in OPERATIONS.items()}


def _service(model: Any, names: tuple[str, ...]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    operations = {
        name: [_add(getattr(model.operation_model(name), f"{part}_shape"), made, model) for part in ("input", "output")]
        for name in names
    }
    return {"version": model.api_version, "operations": operations, "shapes": dict(sorted(made.items()))}


def _add(shape: Shape | None, made: dict[str, Any], model: Any) -> str:
    """Add a structure or a list. Return its name, or the type of a scalar, which has no name."""
    if shape is None:
        return ""
    if not isinstance(shape, StructureShape | ListShape):
        return str(shape.type_name)
    if shape.name not in made:
        # Before its members, which may contain it.
        made[shape.name] = None
        if isinstance(shape, StructureShape):
            made[shape.name] = {
                name: [
                    member.serialization.get("name", name),
                    _add(member, made, model),
                    _key(name, member, model.metadata["protocol"]),
                ]
                for name, member in shape.members.items()
            }
        else:
            made[shape.name] = [_add(shape.member, made, model), shape.member.serialization.get("name", "member")]
    return str(shape.name)


def _key(name: str, member: Shape, protocol: str) -> str:
    """The name of a member in requests: `botocore.serialize.EC2Serializer` and `QuerySerializer`."""
    if protocol != "ec2":
        return str(member.serialization.get("name", name))
    if "queryName" in member.serialization:
        return str(member.serialization["queryName"])
    found = str(member.serialization.get("name", name))
    return found[0].upper() + found[1:]


def text() -> str:
    """One line per shape, so that differences are readable."""
    services = []
    for name, service in shapes().items():
        lines = ",\n".join(f"{_json(shape)}:{_json(members)}" for shape, members in service.pop("shapes").items())
        services.append(f'{_json(name)}:{_json(service)[:-1]},"shapes":{{\n{lines}\n}}}}')
    return "{" + ",\n".join(services) + "}\n"


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


if __name__ == "__main__":
    SHAPES.write_text(text(), encoding="utf-8")
