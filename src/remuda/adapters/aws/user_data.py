"""User data: a header with this pool's values over `bootstrap.sh`. No credential goes in."""

from __future__ import annotations

import base64
import gzip
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources

from remuda.adapters.aws.ec2.options import SCRIPT, Options
from remuda.adapters.aws.tags import FIRST_LIFE_TAG
from remuda.domain.errors import UserError

#: EC2's limit, before it is encoded.
MAX_BYTES = 16 * 1024
#: How long a machine lives that has not read yet how long its launch gave it.
BOOT_LIFE_S = 1_800

_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]{0,63}")
#: What systemd's environment files take without quoting.
_VALUE = re.compile(r"[A-Za-z0-9_./:,=@%+-]{0,1000}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """What lies where on a machine. The agent reads what the bootstrap puts there."""

    #: Software: `bin/remuda` and the pristine `runner/`.
    opt: str = "/opt/remuda"
    #: The agent's own: only root may look.
    state: str = "/var/lib/remuda"
    #: Root's, with the jobs' folders in it: `runner/`, `work/`, `tmp/`.
    jobs: str = "/var/lib/remuda-jobs"
    units: str = "/etc/systemd/system"
    #: Where it is said who may use cron and at.
    etc: str = "/etc"
    job_user: str = "remuda-job"


@cache
def _bootstrap() -> str:
    return resources.files("remuda.adapters.aws").joinpath("bootstrap.sh").read_text(encoding="utf-8")


def build_user_data(
    options: Options,
    *,
    pool: str,
    environment: Mapping[str, str],
    layout: Layout | None = None,
    boot_life_s: int = BOOT_LIFE_S,
) -> str:
    """`environment` is what the agent gets to see beyond its backend, pool and region: nothing secret."""
    places = layout or Layout()
    variables = {
        "boot_life_s": str(boot_life_s),
        "first_life_tag": FIRST_LIFE_TAG,
        "opt": places.opt,
        "state": places.state,
        "units": places.units,
        "etc": places.etc,
        "job_user": places.job_user,
        "agent_url": options.agent_url,
        "agent_sha256": options.agent_sha256,
        "python_url": options.python_url,
        "python_sha256": options.python_sha256,
        "runner_url": options.runner_url,
        "runner_version": options.runner_version,
        "runner_sha256": options.runner_sha256,
        "script": _packed(options.script),
    }
    pairs = {"REMUDA_BACKEND": "aws", "REMUDA_POOL": pool, **environment}
    header = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
    header.append(f"environment=({' '.join(shlex.quote(_pair(name, pairs[name])) for name in sorted(pairs))})")
    text = "\n".join(["#!/bin/bash", *header, _bootstrap()])
    if len(text.encode()) > MAX_BYTES:
        raise UserError(
            f"{SCRIPT} makes the user data {len(text.encode())} bytes long",
            field=SCRIPT,
            fix=f"let the script fetch what is large: EC2 takes {MAX_BYTES} bytes in all",
        )
    return text


def _packed(script: str) -> str:
    # Without a time in it: the same script gives the same template.
    return base64.b64encode(gzip.compress(script.encode(), mtime=0)).decode() if script else ""


def _pair(name: str, value: str) -> str:
    if not _VARIABLE.fullmatch(name) or not _VALUE.fullmatch(value):
        raise UserError(
            f"the agent's environment cannot have {name[:64]!r} with this value",
            field=name[:64],
            fix="use letters, digits and ./:,=@%+-_ only",
        )
    return f"{name}={value}"
