"""The tags of our machines, beyond the pool's and the provision's. The machine reads its own from its metadata."""

from __future__ import annotations

#: Which launch made it: a provision may launch more than once.
LAUNCH_TAG = "remuda:launch"
#: How long the machine lives unless its agent is told otherwise.
FIRST_LIFE_TAG = "remuda:first-life-s"
#: The pool's clock margin.
MARGIN_TAG = "remuda:margin-s"

#: Those of terraform-aws-github-runner, so that scale-down sees one kind of fleet.
GHR_ENVIRONMENT_TAG = "ghr:environment"
GHR_APPLICATION_TAG = "ghr:Application"
GHR_OWNER_TAG = "ghr:Owner"
GHR_TYPE_TAG = "ghr:Type"
GHR_APPLICATION = "github-action-runner"

#: AWS gives these itself; nobody else may set them.
RESERVED_PREFIX = "aws:"
