"""The tags of our machines, beyond the pool's and the provision's. The machine reads its own from its metadata."""

from __future__ import annotations

#: Those of terraform-aws-github-runner, so that scale-down sees one kind of fleet.
from remuda.domain.scale_down.fleet import (
    GHR_APPLICATION,
    GHR_APPLICATION_TAG,
    GHR_ENVIRONMENT_TAG,
    GHR_OWNER_TAG,
    GHR_TYPE_TAG,
)

__all__ = [
    "FIRST_LIFE_TAG",
    "GHR_APPLICATION",
    "GHR_APPLICATION_TAG",
    "GHR_ENVIRONMENT_TAG",
    "GHR_OWNER_TAG",
    "GHR_TYPE_TAG",
    "LAUNCH_TAG",
    "MARGIN_TAG",
    "RESERVED_PREFIX",
]

#: Which launch made it: a provision may launch more than once.
LAUNCH_TAG = "remuda:launch"
#: How long the machine lives unless its agent is told otherwise.
FIRST_LIFE_TAG = "remuda:first-life-s"
#: The pool's clock margin.
MARGIN_TAG = "remuda:margin-s"

#: AWS gives these itself; nobody else may set them.
RESERVED_PREFIX = "aws:"
