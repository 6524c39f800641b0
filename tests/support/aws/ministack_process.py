"""Ministack with an adjustable clock. Runs in the interpreter of the servers' own virtualenv.

The first argument is a file with the seconds to add to the real time, as one double. Visibility timeouts and item
expiry follow that clock, so no test has to wait for them. Long pauses of background tasks are shortened. Conditions of
CloudFormation templates may contain Fn::Join of a list parameter, like on AWS. Change sets evaluate conditions first,
as AWS does ("Conditions" in the guide of CloudFormation): a new parameter in the other branch of an Fn::If changes
nothing. The service-linked role of spot instances has the name that AWS gives it.
"""

import importlib
import importlib.abc
import importlib.util
import mmap
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

real_time = time.time  # noqa: TID251 - the clock to move
real_sleep = time.sleep  # noqa: TID251
LONGEST_SLEEP_S = 0.5
CONDITIONS = "ministack.services.cloudformation.engine"
CHANGE_SETS = "ministack.services.cloudformation.changesets"
ROLES = "ministack.services.iam"
#: The service-linked role of spot instances, as AWS and as this server name it.
SPOT_ROLE, OTHER_SPOT_ROLE = "AWSServiceRoleForEC2Spot", "AWSServiceRoleForSpot"


def sleep(seconds: Any) -> None:
    real_sleep(min(float(seconds), LONGEST_SLEEP_S))


class ChangingFinder(importlib.abc.MetaPathFinder):
    """Changes a module when it is imported, which takes too long for servers without stacks."""

    def __init__(self, name: str, change: Callable[[Any], None]) -> None:
        self._name, self._change = name, change

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:  # noqa: ARG002 - those of the base class
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            self._change(module)

        spec.loader.exec_module = exec_module
        return spec


def change_conditions(module: Any) -> None:
    evaluate = module._evaluate_conditions
    module._evaluate_conditions = lambda template, parameters: evaluate(
        {**template, "Conditions": joined(template.get("Conditions", {}), parameters)}, parameters
    )


def change_change_sets(module: Any) -> None:
    compare = module._diff_resources

    def diff(old: Any, new: Any, resources: Any, template: Any, parameters: Any, retag: Any) -> Any:
        """`old` and `new` are evaluated, `template` is not."""
        template = {**template, "Resources": dict(template["Resources"])}
        for name, each in template["Resources"].items():
            before, after = (one.get("Resources", {}).get(name, {}).get("Properties") or {} for one in (old, new))
            properties = {
                key: without(value, parameters) if before.get(key) == after.get(key) else value
                for key, value in (each.get("Properties") or {}).items()
            }
            template["Resources"][name] = {**each, "Properties": properties}
        return compare(old, new, resources, template, parameters, retag)

    module._diff_resources = diff


def change_roles(module: Any) -> None:
    create = module._IAM_HANDLERS["CreateServiceLinkedRole"]

    def create_named(parameters: Any) -> Any:
        if module._p(parameters, "AWSServiceName") != "spot.amazonaws.com":
            return create(parameters)
        if SPOT_ROLE in module._roles:
            message = f"Service role name {SPOT_ROLE} has been taken in this account, please try a different suffix."
            return module._error(400, "InvalidInput", message, ns="iam")
        answer = create(parameters)
        role = module._roles.pop(OTHER_SPOT_ROLE)
        arn = role["Arn"].replace(OTHER_SPOT_ROLE, SPOT_ROLE)
        module._roles[SPOT_ROLE] = {**role, "RoleName": SPOT_ROLE, "Arn": arn}
        return answer

    module._IAM_HANDLERS["CreateServiceLinkedRole"] = create_named


def without(value: Any, names: Any) -> Any:
    """An expression without its references to these parameters."""
    match value:
        case {"Ref": name} if name in names:
            return ""
        case dict():
            return {key: without(each, names) for key, each in value.items()}
        case list():
            return [without(each, names) for each in value]
    return value


def joined(value: Any, parameters: Any) -> Any:
    """An expression in which the Fn::Join of list parameters are texts."""
    match value:
        case {"Fn::Join": [delimiter, {"Ref": name}]}:
            return parameters[name]["Value"].replace(",", delimiter)
        case dict():
            return {key: joined(each, parameters) for key, each in value.items()}
        case list():
            return [joined(each, parameters) for each in value]
    return value


def main() -> None:
    with Path(sys.argv.pop(1)).open("r+b") as file:
        offset = mmap.mmap(file.fileno(), 8)
    time.time = lambda: real_time() + struct.unpack("<d", offset[:8])[0]  # noqa: TID251
    time.sleep = sleep  # noqa: TID251
    sys.meta_path.insert(0, ChangingFinder(CONDITIONS, change_conditions))
    sys.meta_path.insert(0, ChangingFinder(CHANGE_SETS, change_change_sets))
    sys.meta_path.insert(0, ChangingFinder(ROLES, change_roles))
    # Imported after the clock is replaced, because it binds `time.time`.
    importlib.import_module("ministack.app").main()


if __name__ == "__main__":
    main()
