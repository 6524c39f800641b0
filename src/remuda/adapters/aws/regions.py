"""Regions of AWS, to reject a mistyped one before any call: its host names would not exist."""

from __future__ import annotations

import json
import os
import re
from functools import cache
from pathlib import Path

import botocore

from remuda.domain.errors import UserError
from remuda.domain.text import nearest

_REGION = re.compile(r"[a-z]{2,4}(-[a-z]+)+-[0-9]{1,2}")
_MAX_SHOWN = 40


def check_region(region: str, *, field: str) -> None:
    """Raise `UserError` for a region that the installed botocore does not know.

    A region that is newer than botocore is rejected, too, because it cannot be told from a mistyped one; the error says
    how to update botocore. With AWS_ENDPOINT_URL, as for an emulator of AWS, any name of the usual form is valid.
    """
    if _REGION.fullmatch(region) and (os.environ.get("AWS_ENDPOINT_URL") or region in known_regions()):
        return
    near = nearest(region.strip().lower(), sorted(known_regions()))
    suggestion = f"use {near}" if near else "use a region such as eu-central-1"
    raise UserError(
        f"{field} is {region[:_MAX_SHOWN]!r}, which is not a region of AWS",
        field=field,
        fix=f"{suggestion}; for a region that opened recently, run pip install --upgrade botocore",
    )


@cache
def known_regions() -> frozenset[str]:
    """The regions of all partitions, by botocore's own list."""
    document = json.loads((Path(botocore.__file__).parent / "data" / "partitions.json").read_text(encoding="utf-8"))
    names = (name for partition in document["partitions"] for name in partition["regions"])
    return frozenset(name for name in names if _REGION.fullmatch(name))
