"""Ministack with an adjustable clock. Runs in the interpreter of the servers' own virtualenv.

The first argument is a file with the seconds to add to the real time, as one double. Visibility timeouts and item
expiry follow that clock, so no test has to wait for them. Long pauses of background tasks are shortened. Conditions of
CloudFormation templates may contain Fn::Join of a list parameter, like on AWS.
"""

import importlib
import importlib.abc
import importlib.util
import mmap
import struct
import sys
import time
from pathlib import Path
from typing import Any

real_time = time.time  # noqa: TID251 - the clock to move
real_sleep = time.sleep  # noqa: TID251
LONGEST_SLEEP_S = 0.5
CONDITIONS = "ministack.services.cloudformation.engine"


def sleep(seconds: Any) -> None:
    real_sleep(min(float(seconds), LONGEST_SLEEP_S))


class ConditionsFinder(importlib.abc.MetaPathFinder):
    """Changes the evaluation of conditions when it is imported, which takes too long for servers without stacks."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:  # noqa: ARG002 - those of the base class
        if name != CONDITIONS:
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            evaluate = module._evaluate_conditions
            module._evaluate_conditions = lambda template, parameters: evaluate(
                {**template, "Conditions": joined(template.get("Conditions", {}), parameters)}, parameters
            )

        spec.loader.exec_module = exec_module
        return spec


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
    sys.meta_path.insert(0, ConditionsFinder())
    # Imported after the clock is replaced, because it binds `time.time`.
    importlib.import_module("ministack.app").main()


if __name__ == "__main__":
    main()
