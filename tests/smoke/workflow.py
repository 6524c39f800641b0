"""The workflow of a smoke run: that of `remuda deploy`, with this action and real jobs."""

from __future__ import annotations

import re
from pathlib import Path

from remuda import __version__
from remuda.domain.errors import RemudaError

ROOT = Path(__file__).parents[2]
#: Pinned like in deploy/workflows.
CHECKOUT = "actions/checkout@08c6903cd8c0fde910a37f88322edcfb5dd907a8 # v5.0.0"
#: A job that needs what sandboxes offer: root rights, packages of the distribution, docker, and the network.
JOB = """\
      - run: sudo id -u | grep -qx 0
      - run: sudo apt-get update -qq && sudo apt-get install -qqy hello && hello
      - run: docker run --rm public.ecr.aws/docker/library/hello-world
      - run: |
          cat >Dockerfile <<'END'
          FROM public.ecr.aws/docker/library/busybox
          RUN echo built >/built
          END
          docker build -q -t smoke . && docker run --rm smoke cat /built | grep -qx built
      - run: "! curl -sf -m 3 http://169.254.169.254/latest/meta-data/"
"""
#: A job that is still running when the notice arrives.
LONG_JOB = """\
      - run: sleep 900
"""
_ACTION = re.compile(rf"uses: \S+/\S+@v{re.escape(__version__)}\n")
_FIRST_STEP = re.compile(r"(    steps:\n)(      - uses: aws-actions/)")
_STEPS = re.compile(r"      - run: echo \"Hello from[^\n]*\n")


def smoke_workflow(pasted: str, *, job: str, spot: bool = False) -> str:
    """The workflow that `remuda deploy` printed, with the action of the branch and these steps."""
    text, actions = _ACTION.subn("uses: ./\n", pasted)
    # The branch contains the action.
    text, steps = _FIRST_STEP.subn(
        rf"\1      - uses: {CHECKOUT}\n        with:\n          persist-credentials: false\n\2", text
    )
    text, jobs = _STEPS.subn(lambda _: job, text)
    text, rights = re.subn(r"(      id-token: write[^\n]*\n)", r"\1      contents: read\n", text)
    if spot:
        text, places = re.subn(r"(          instance-count: \"1\"\n)", r'\1          usage-class: "spot"\n', text)
    else:
        places = 1
    if not (actions == steps == rights == 2 and jobs == places == 1):
        raise RemudaError("the workflow of remuda deploy has another form than the smoke run expects")
    return text


def set_workflow(pasted: str, *, job: str) -> str:
    """The workflow that `remuda deploy` printed for a runner set, with these steps."""
    text, jobs = _STEPS.subn(lambda _: job, pasted)
    if jobs != 1 or _ACTION.search(text):
        raise RemudaError("the workflow of remuda deploy has another form than the smoke run expects")
    return text


def branch_files(workflow: str) -> dict[str, str]:
    """The files of the branch: the workflow, and the action as it is in this repository."""
    action = [ROOT / "action.yml", *sorted(file for file in (ROOT / "deploy" / "action").iterdir() if file.is_file())]
    return {
        ".github/workflows/smoke.yml": workflow,
        **{str(file.relative_to(ROOT)): file.read_text(encoding="utf-8") for file in action},
    }
