"""The workflow to paste after a deployment."""

from __future__ import annotations

import json

from remuda import __version__

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
        uses: your-org/remuda@v{version}
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
      - uses: your-org/remuda@v{version}
        with:
          mode: release
          pool: {pool}
"""


def workflow_text(*, pool: str, region: str, role: str, environment: str = "") -> str:
    """`environment` is a GitHub environment, if only jobs in some of them may use the pool."""
    return _TEMPLATE.format(
        configure=CONFIGURE_CREDENTIALS,
        role=role,
        region=region,
        pool=pool,
        version=__version__,
        environment=f"    environment: {json.dumps(environment)}\n" if environment else "",
    )
