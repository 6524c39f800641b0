"""Validator for CloudWatch's embedded metric format: AWS' schema and the rules beyond it."""

from __future__ import annotations

import json
from typing import Any

import jsonschema_rs

MAX_LINE = 256 * 1024
SIZES = [f"{prefix}{unit}" for unit in ("bytes", "bits") for prefix in ("", "Kilo", "Mega", "Giga", "Tera")]
COUNTED = [*(size.capitalize() for size in SIZES), "Count"]
UNITS = ["Seconds", "Microseconds", "Milliseconds", "Percent", "None", *COUNTED]
UNITS += [f"{unit}/Second" for unit in COUNTED]
NAME = {"type": "string", "minLength": 1, "maxLength": 1_024}
METRIC = {
    "type": "object",
    "required": ["Name"],
    "additionalProperties": False,
    "properties": {"Name": NAME, "Unit": {"enum": UNITS}, "StorageResolution": {"enum": [1, 60]}},
}
DIRECTIVE = {
    "type": "object",
    "required": ["Namespace", "Dimensions", "Metrics"],
    "additionalProperties": False,
    "properties": {
        "Namespace": {"type": "string", "pattern": "^[^:][0-9A-Za-z.\\-_/#:\\s]*$", "minLength": 1, "maxLength": 1_024},
        "Dimensions": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "array",
                "minItems": 1,
                "maxItems": 30,
                "items": {"type": "string", "minLength": 1, "maxLength": 250},
            },
        },
        "Metrics": {"type": "array", "minItems": 1, "maxItems": 100, "items": METRIC},
    },
}
SCHEMA = {
    "type": "object",
    "required": ["_aws"],
    "properties": {
        "_aws": {
            "type": "object",
            "required": ["Timestamp", "CloudWatchMetrics"],
            "properties": {
                "Timestamp": {"type": "integer", "minimum": 0},
                "CloudWatchMetrics": {"type": "array", "minItems": 1, "items": DIRECTIVE},
            },
        }
    },
}
_VALIDATOR = jsonschema_rs.validator_for(SCHEMA)


def check_emf(line: dict[str, Any]) -> None:
    _VALIDATOR.validate(line)
    assert len(json.dumps(line).encode()) <= MAX_LINE
    for directive in line["_aws"]["CloudWatchMetrics"]:
        names = [item["Name"] for item in directive["Metrics"]]
        assert len(set(names)) == len(names)
        for name in names:
            value = line[name]
            assert isinstance(value, int | float), f"{name} is {value!r}"
            assert not isinstance(value, bool)
            assert abs(value) <= 2**360
        for dimension in {each for group in directive["Dimensions"] for each in group}:
            # Printable ASCII, not blank, and no leading colon.
            value = line[dimension]
            assert isinstance(value, str)
            assert 1 <= len(value) <= 1_024
            assert value.isascii()
            assert value.isprintable()
            assert value.strip()
            assert not value.startswith(":")
