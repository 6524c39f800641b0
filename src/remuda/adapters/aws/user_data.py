"""User data of an instance: a header with the pool's values, followed by `bootstrap.sh`. It contains no credential.

Also the other parts of the contract between a launch and the agent: directory layout and tags of the machine.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from remuda.adapters.aws.ec2.options import SCRIPT, AgentBundle, Ec2LaunchOptions
from remuda.domain.errors import UserError
from remuda.domain.resources import Architecture
from remuda.domain.runner_release import LATEST, VERSION, PackageArchitecture, RunnerChoice

#: EC2's limit for user data before base64 encoding.
MAX_BYTES = 16 * 1024
#: Seconds of the dead-man timer that every machine sets at boot, before it reads FIRST_LIFE_TAG.
BOOT_LIFE_S = 1_800
#: Tag with the seconds of the dead-man timer that applies until the agent sets another.
FIRST_LIFE_TAG = "remuda:first-life-s"
#: Tag with the pool's clock margin.
MARGIN_TAG = "remuda:margin-s"

#: Variables of the agent. Paths are separated by colons.
CACHE_PATHS_VARIABLE = "REMUDA_CACHE_PATHS"
CACHE_GIB_VARIABLE = "REMUDA_CACHE_GIB"
#: Separated by commas.
MODULES_VARIABLE = "REMUDA_KERNEL_MODULES"

_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]{0,63}")
#: Characters that need no quoting in systemd's environment files.
_VALUE = re.compile(r"[A-Za-z0-9_./:,=@%+-]{0,1000}")


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineLayout:
    """Directories of a machine, as created by the bootstrap and used by the agent."""

    #: Software: `bin/remuda` and the unmodified `runner/`.
    opt: str = "/opt/remuda"
    #: State of the agent, readable by root only.
    state: str = "/var/lib/remuda"
    units: str = "/etc/systemd/system"

    @property
    def sandboxes(self) -> str:
        """The sandboxes, each in a folder with its number as the name."""
        return f"{self.state}/sandboxes"

    @property
    def job_image(self) -> str:
        """The root file system of jobs, if it is not the machine's own."""
        return f"{self.state}/job-image"


@cache
def _bootstrap() -> str:
    return Path(__file__).with_name("bootstrap.sh").read_text(encoding="utf-8")


def build_user_data(
    options: Ec2LaunchOptions,
    *,
    pool: str,
    environment: Mapping[str, str],
    layout: MachineLayout | None = None,
    boot_life_s: int = BOOT_LIFE_S,
) -> str:
    """`environment` is added to the agent's environment (backend, pool, region). It must not contain a secret."""
    layout = layout or MachineLayout()
    variables = {
        "purpose": "boot",
        "boot_life_s": str(boot_life_s),
        "first_life_tag": FIRST_LIFE_TAG,
        "opt": layout.opt,
        "state": layout.state,
        "units": layout.units,
        **_agent_variables(options.agents),
        **_runner_variables(options.runner),
        "job_image_url": options.job_image_url,
        "job_image_sha256": options.job_image_sha256,
        "script": options.script,
    }
    pairs = {"REMUDA_BACKEND": "aws", "REMUDA_POOL": pool, **environment}
    if options.cache_paths:
        pairs |= {CACHE_PATHS_VARIABLE: ":".join(options.cache_paths), CACHE_GIB_VARIABLE: options.cache_gib}
    if options.modules:
        pairs[MODULES_VARIABLE] = ",".join(options.modules)
    header = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
    header.append(f"environment=({' '.join(shlex.quote(_pair(name, pairs[name])) for name in sorted(pairs))})")
    text = "\n".join(["#!/bin/bash", *header, _bootstrap()])
    size = len(compress(text))
    if size > MAX_BYTES:
        raise UserError(
            f"the compressed user data with {SCRIPT} is {size} bytes long, EC2's limit is {MAX_BYTES}",
            field=SCRIPT,
            fix="shorten the script: let it download large parts",
        )
    return text


def _agent_variables(agents: Sequence[AgentBundle]) -> dict[str, str]:
    bundles = {each.architecture: each for each in agents}
    variables = {}
    for name in Architecture:
        bundle = bundles.get(name)
        variables[f"agent_url_{name}"] = bundle.url if bundle else ""
        variables[f"agent_sha256_{name}"] = bundle.sha256 if bundle else ""
    return variables


def _runner_variables(choice: RunnerChoice) -> dict[str, str]:
    """The version to install, with URL and digest per architecture. Without a version, the image's runner is used."""
    if choice.version == LATEST:
        raise UserError(
            f"{VERSION} is {LATEST}, but no version is known yet",
            field=VERSION,
            fix="run remuda refresh, which finds it",
        )
    release = choice.release
    variables = {"runner_version": release.version if release else ""}
    packages = {item.architecture: item for item in release.packages} if release else {}
    for each in PackageArchitecture:
        package = packages.get(each)
        variables[f"runner_url_{each}"] = package.url if package else ""
        variables[f"runner_sha256_{each}"] = package.sha256 if package else ""
    return variables


def compress(text: str) -> bytes:
    """The user data as EC2 keeps it. cloud-init decompresses it (its documentation, "Gzip compressed content")."""
    import gzip  # noqa: PLC0415 - as above

    return gzip.compress(text.encode(), mtime=0)


def _pair(name: str, value: str) -> str:
    if not _VARIABLE.fullmatch(name) or not _VALUE.fullmatch(value):
        raise UserError(
            f"the name or value of {name[:64]!r} is not usable in the agent's environment",
            field=name[:64],
            fix="use letters, digits and ./:,=@%+-_ only",
        )
    return f"{name}={value}"
