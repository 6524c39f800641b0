"""The images of a pool and of its listener, pinned by `remuda deploy` unless the user has given them.

Canonical publishes the current image of Ubuntu in a Systems Manager parameter, whose value changes every few weeks.
The stack gets the id of today, so that a rollback brings back the earlier image, and an instance that is replaced at
night is like its predecessor. The next deployment reads the parameter again. Example of the stack of a new pool:

    parameter Ami        ami-0123456789abcdef0
    output AmiSource     /aws/service/canonical/ubuntu/server/24.04/stable/current/amd64/hvm/ebs-gp3/ami-id

ListenerAmi and ListenerAmiSource are those of the listener.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

from remuda.adapters.aws.ec2.options import SSM_PREFIX

#: Parameters with Ubuntu's images in every region ("Find Ubuntu images on AWS" in Canonical's documentation).
UBUNTU = "/aws/service/canonical/ubuntu/server/24.04/stable/current/"
#: What the stack names as the source of an image of the user.
GIVEN = "given"


class ChosenImage(NamedTuple):
    #: An id, or what the user has given: it may be resolve:ssm:NAME, too.
    image: str
    #: The Systems Manager parameter that it was read from, or `GIVEN`.
    source: str


def source_output(parameter: str) -> str:
    """The output of the stack with the source of the image in this parameter."""
    return f"{parameter}Source"


async def choose_image(
    *,
    given: str,
    stored: str,
    stored_source: str,
    default: str,
    read: Callable[[str], Awaitable[str]],
) -> ChosenImage:
    """The image of a deployment. `default` is resolve:ssm:NAME, and `read` reads a Systems Manager parameter."""
    if given:
        return ChosenImage(given, GIVEN)
    # Stacks of earlier versions have no source, and the default as it was.
    if not stored_source and stored.startswith(SSM_PREFIX + UBUNTU):
        stored_source = stored.removeprefix(SSM_PREFIX)
    if stored and stored_source in {"", GIVEN}:
        return ChosenImage(stored, GIVEN)
    source = stored_source or default.removeprefix(SSM_PREFIX)
    return ChosenImage(await read(source), source)


def add_sources(outputs: dict[str, object], images: Mapping[str, ChosenImage]) -> None:
    """Add the sources to the outputs of a template."""
    for parameter, chosen in images.items():
        what = f"Systems Manager parameter that {parameter} was read from, or {GIVEN!r}."
        outputs[source_output(parameter)] = {"Description": what, "Value": chosen.source}
