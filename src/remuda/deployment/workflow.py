"""Texts to paste after a deployment: a workflow, and the command of a listener that does not run in the stack."""

from __future__ import annotations

import json

from remuda import __version__
from remuda.aws_lambda.runtime import SETTINGS_VARIABLE
from remuda.config.declaration import variable
from remuda.deployment.policies import settings_parameter
from remuda.domain.runner_set import RunnerSet
from remuda.source_repository import UNKNOWN_REPOSITORY

#: Pinned like in deploy/workflows.
CONFIGURE_CREDENTIALS = "aws-actions/configure-aws-credentials@a03048d87541d1d9fcf2ecf528a4a65ba9bd7838 # v5.0.0"
_TEMPLATE = """\
name: ci

on: push

permissions: {{}}

jobs:
  provision:
    runs-on: ubuntu-latest
{environment}    permissions:
      id-token: write # proves to AWS and to the pool which run this is
    outputs:
      label: ${{{{ steps.remuda.outputs.label }}}}
    steps:
      - uses: {configure}
        with:
          role-to-assume: {role}
          aws-region: {region}
      - id: remuda
        uses: {repository}@v{version}
        with:
          mode: provision
          pool: {pool}
          instance-count: "1"

  test:
    needs: provision
    runs-on: ${{{{ needs.provision.outputs.label }}}}
    steps:
      - run: echo "Hello from $(hostname)"

  release:
    needs: [provision, test]
    if: always()
    runs-on: ubuntu-latest
{environment}    permissions:
      id-token: write
    steps:
      - uses: {configure}
        with:
          role-to-assume: {role}
          aws-region: {region}
      - uses: {repository}@v{version}
        with:
          mode: release
          pool: {pool}
"""


def workflow_text(*, pool: str, region: str, role: str, environment: str = "", repository: str = "") -> str:
    """A workflow that provisions and releases.

    `environment` is a GitHub environment, if only jobs in some of them may use the pool. `repository` is OWNER/REPO of
    the action.
    """
    return _TEMPLATE.format(
        configure=CONFIGURE_CREDENTIALS,
        role=role,
        region=region,
        pool=pool,
        repository=repository or UNKNOWN_REPOSITORY,
        version=__version__,
        environment=f"    environment: {json.dumps(environment)}\n" if environment else "",
    )


def set_workflow_text(runner_set: RunnerSet) -> str:
    """A workflow whose job gets a runner of the set, without any other job."""
    labels = json.dumps(list(runner_set.labels), ensure_ascii=False)
    return f"""\
name: ci

on: push

permissions: {{}}

jobs:
  test:
    runs-on: {labels}
    steps:
      - run: echo "Hello from $(hostname)"
"""


def container_text(*, pool: str, region: str, secret: str, is_app: bool) -> str:
    """The command of a container; ECS and Kubernetes take the same variables."""
    variables = {
        "AWS_REGION": region,
        variable("pool"): pool,
        variable("github_app_key" if is_app else "github_token"): secret,
        SETTINGS_VARIABLE: settings_parameter().replace("<pool>", pool),
    }
    flags = "".join(f"  --env {name}={value} \\\n" for name, value in variables.items())
    return f"""\
docker build --tag remuda-listener --file deploy/Dockerfile .
docker run --detach --restart always --read-only --tmpfs /tmp \\
{flags}  remuda-listener

Its AWS role needs the policies remuda-{pool}-provision and remuda-{pool}-listener.
"""
