"""The machine of the listener: its user data and defaults, for the CloudFormation template and the Terraform module."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files

from remuda.adapters.aws.ec2.options import SSM_PREFIX
from remuda.adapters.aws.launch import GROUP_VARIABLE, STACK_VARIABLE
from remuda.aws_lambda.runtime import SETTINGS_VARIABLE
from remuda.config.declaration import variable
from remuda.deployment.images import UBUNTU

#: Ubuntu's current image, whose Python runs the bundle without a package. x86_64, as the tests run
#: bundles there; ARM would save 1.5 dollars per month, but no bundle for it was run yet.
DEFAULT_LISTENER_IMAGE = f"{SSM_PREFIX}{UBUNTU}amd64/hvm/ebs-gp3/ami-id"
DEFAULT_LISTENER_TYPE = "t3.micro"
#: Root device of Ubuntu's images.
ROOT_DEVICE = "/dev/sda1"
VOLUME_GIB = 8
#: Seconds after which a machine is replaced, to get the updates of its image.
MAX_LIFE_S = 30 * 86_400
#: Seconds until an instance whose listener has not proved that it works is abandoned. Boot and download take two
#: minutes.
READY_TIMEOUT_S = 600
#: Seconds that an update of the stack waits for a new listener, before it is rolled back.
UPDATE_TIMEOUT_S = 900
#: Lines around the part of bootstrap.sh that the listener's user data contains, too.
SHARED_BEGIN, SHARED_END = "# Shared with the user data of the listener", "# End of the shared part."

_HEADER = """\
#!/bin/bash
set -euE -o pipefail
umask 022
opt=/opt/remuda etc=/etc/remuda units=/etc/systemd/system
agent_url='{agent_url}'
agent_sha256='{agent_sha256}'
environment=({environment})
say() {{ printf 'remuda: %s\\n' "$*"; }}
# A machine without a listener is of no use: its group replaces it after it has stopped.
fail() {{
  trap - ERR
  say "bootstrap failed, powering off in a minute: $*"
  shutdown -P +1
  exit 1
}}
trap 'fail "line $LINENO: $BASH_COMMAND"' ERR
"""


def listener_user_data(value_of: Callable[[str], str], escape: Callable[[str], str]) -> str:
    """User data without a credential.

    `value_of` is the reference to a value in the language of the template, and `escape` quotes a text in it.
    """
    variables = {
        "REMUDA_BACKEND": "aws",
        variable("pool"): value_of("pool"),
        # The ARN of a secret. An empty variable counts as unset.
        variable("github_token"): value_of("github_token"),
        variable("github_app_key"): value_of("github_app_key"),
        SETTINGS_VARIABLE: value_of("settings"),
        GROUP_VARIABLE: value_of("group"),
        # Empty without CloudFormation.
        STACK_VARIABLE: value_of("stack"),
    }
    header = _HEADER.format(
        agent_url=value_of("agent_url"),
        agent_sha256=value_of("agent_sha256"),
        environment=" ".join(f"'{name}={value}'" for name, value in variables.items()),
    )
    folder = files("remuda.adapters.aws")
    bootstrap = folder.joinpath("bootstrap.sh").read_text(encoding="utf-8")
    _, begin, rest = bootstrap.partition(SHARED_BEGIN)
    shared, end, _ = rest.partition(SHARED_END)
    if not (begin and end):
        raise ValueError("bootstrap.sh has no shared part")
    # Without the rest of the first line.
    functions = shared.partition("\n")[2]
    return header + escape(f"\n{functions}\n{folder.joinpath('listener.sh').read_text(encoding='utf-8')}")
