"""Evaluator of a CloudFormation template: the resources and outputs of a stack with given parameters."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

NO_VALUE = object()


@dataclass(kw_only=True)
class EvaluatedStack:
    template: Mapping[str, Any]
    parameters: Mapping[str, str]
    #: Values of `AWS::Region` and the like.
    pseudo: Mapping[str, str]
    #: Attributes of a resource by type and properties; `Ref` is the one of that name.
    attributes: Any

    @cached_property
    def values(self) -> dict[str, Any]:
        declared = self.template["Parameters"]
        unknown = self.parameters.keys() - declared.keys()
        if unknown:
            raise ValueError(f"no such parameters: {', '.join(sorted(unknown))}")
        found = {name: self.parameters.get(name, each["Default"]) for name, each in declared.items()}
        return {
            name: value.split(",") if declared[name]["Type"] == "CommaDelimitedList" else value
            for name, value in found.items()
        }

    def is_refused(self) -> bool:
        """Whether CloudFormation refuses the parameters: by their own limits, or by a rule."""
        declared = self.template["Parameters"]
        for name, value in self.values.items():
            for each in value if isinstance(value, list) else [value]:
                limits = declared[name]
                if each not in limits.get("AllowedValues", [each]):
                    return True
                if not re.fullmatch(limits.get("AllowedPattern", "(?s).*"), each):
                    return True
        return any(
            self._holds(rule["RuleCondition"]) and not all(self._holds(each["Assert"]) for each in rule["Assertions"])
            for rule in self.template["Rules"].values()
        )

    @cached_property
    def resources(self) -> dict[str, tuple[str, dict[str, Any]]]:
        """Type and properties by logical id, of the resources whose condition holds."""
        return {name: self._resource(name) for name, each in self.template["Resources"].items() if self._exists(each)}

    @cached_property
    def outputs(self) -> dict[str, Any]:
        return {
            name: self._resolve(each["Value"]) for name, each in self.template["Outputs"].items() if self._exists(each)
        }

    def _exists(self, declared: Mapping[str, Any]) -> bool:
        return "Condition" not in declared or self._holds({"Condition": declared["Condition"]})

    def _resource(self, name: str) -> tuple[str, dict[str, Any]]:
        declared = self.template["Resources"][name]
        if not self._exists(declared):
            raise ValueError(f"{name} is not created")
        return declared["Type"], self._resolve(declared["Properties"])

    def _attribute(self, name: str, attribute: str) -> Any:
        kind, properties = self._resource(name)
        return self.attributes(kind, properties)[attribute]

    def _named(self, name: str) -> Any:
        if name == "AWS::NoValue":
            return NO_VALUE
        if name in self.pseudo:
            return self.pseudo[name]
        return self.values[name] if name in self.values else self._attribute(name, "Ref")

    def _holds(self, condition: Mapping[str, Any]) -> bool:
        ((function, argument),) = condition.items()
        if function == "Condition":
            return self._holds(self.template["Conditions"][argument])
        if function == "Fn::Not":
            return not self._holds(argument[0])
        if function == "Fn::And":
            return all(map(self._holds, argument))
        if function == "Fn::Or":
            return any(map(self._holds, argument))
        if function != "Fn::Equals":
            raise ValueError(f"unknown condition {function}")
        left, right = map(self._resolve, argument)
        return bool(left == right)

    def _resolve(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            if len(value) == 1:
                ((function, argument),) = value.items()
                if function == "Ref" or function.startswith("Fn::"):
                    return self._call(function, argument)
            found = {key: self._resolve(each) for key, each in value.items()}
            return {key: each for key, each in found.items() if each is not NO_VALUE}
        if isinstance(value, Sequence) and not isinstance(value, str):
            return [each for each in map(self._resolve, value) if each is not NO_VALUE]
        return value

    def _call(self, function: str, argument: Any) -> Any:
        if function == "Ref":
            return self._named(argument)
        if function == "Fn::GetAtt":
            return self._attribute(*argument)
        if function == "Fn::Base64":
            return base64.b64encode(self._resolve(argument).encode()).decode()
        if function == "Fn::If":
            condition, yes, no = argument
            return self._resolve(yes if self._holds({"Condition": condition}) else no)
        if function == "Fn::Join":
            between, parts = argument
            return between.join(self._resolve(parts))
        if function == "Fn::Split":
            between, text = argument
            return self._resolve(text).split(between)
        if function == "Fn::Sub":
            text, own = (argument, {}) if isinstance(argument, str) else argument
            return re.sub(r"\$\{(!?)([^}]*)\}", lambda found: self._substitute(found, own), text)
        raise ValueError(f"unknown function {function}")

    def _substitute(self, found: re.Match[str], own: Mapping[str, Any]) -> str:
        if found[1]:
            return f"${{{found[2]}}}"
        if found[2] in own:
            return str(self._resolve(own[found[2]]))
        name, _, attribute = found[2].partition(".")
        return str(self._attribute(name, attribute) if attribute else self._named(name))
