"""What a job sees in a sandbox of a machine, and the reuse of machines after typical workflows."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import PurePosixPath

import pytest

from tests.support.attacks import IMAGE
from tests.support.aws.ec2_machines import LIMIT_S, MachineStack
from tests.support.namespace_machine.machine import NamespaceMachine, unsupported_reason
from tests.support.virtual_time import until

pytestmark = [
    pytest.mark.namespaces,
    pytest.mark.skipif(bool(unsupported_reason()), reason=unsupported_reason()),
    pytest.mark.timeout(900),
]

#: Folders in which the host keeps files for root only.
FOLDERS = ("/etc", "/root", "/home", "/boot", "/var/cache", "/var/log", "/var/mail", "/var/spool", "/var/lib/remuda")
#: Files for root only that programs in a sandbox need. They contain no secret.
NEEDED = ("/etc/sudoers", "/etc/sudoers.d/*", "/var/cache/ldconfig/aux-cache")
#: Units that a sandbox may run.
UNITS = (
    *("dbus*.service", "dbus*.socket", "docker.service", "docker.socket", "containerd.service", "cron.service"),
    *("crond.service", "atd.service", "systemd-*", "user@*.service", "user-runtime-dir@*.service"),
)
#: A workflow as many have it: checkout, package installation, image build, service container.
WORKFLOW = """
set -x
mkdir -p src && echo 'int main() { return 0; }' >src/main.c && mkdir -p "$RUNNER_TOOL_CACHE/node/20"
! command -v typical || exit 11
mkdir -p pkg/DEBIAN pkg/usr/bin
printf 'Package: typical\\nVersion: 1\\nArchitecture: all\\nMaintainer: x <x@example.com>\\nDescription: x\\n' >pkg/DEBIAN/control
printf '#!/bin/sh\\necho typical\\n' >pkg/usr/bin/typical && chmod 755 pkg/usr/bin/typical
dpkg-deb --build --root-owner-group pkg typical.deb
sudo dpkg -i typical.deb
[ "$(typical)" = typical ]
sudo useradd --create-home extra
systemd-run --version >/dev/null && sudo systemd-run --wait --quiet true
"""
#: For machines with docker.
DOCKER_WORKFLOW = f"""
set -x
! docker image inspect implant 2>/dev/null || exit 11
{IMAGE}
mkdir -p context && printf 'FROM implant\\nCOPY file /file\\nRUN ["/bin/sh", "-c", "cat /file >/built"]\\n' >context/Dockerfile
echo content >context/file
DOCKER_BUILDKIT=0 docker build -t built context
docker run -d --name service built sleep 1000
[ "$(docker exec service cat /built)" = content ]
"""


def files_for_root_only(machine: NamespaceMachine) -> dict[str, str]:
    """The digests of such files by path, on the machine outside its sandbox. Files of sandboxes do not count."""
    found = machine.run("find", *FOLDERS, "-path", "/var/lib/remuda/sandboxes", "-prune", "-o", *ROOT_ONLY, "-print")
    return digests(machine.run("xargs", "-d", r"\n", "sha256sum", stdin=found.stdout).stdout)


#: Neither group nor others can read the file.
ROOT_ONLY = ("-type", "f", "-uid", "0", "-size", "+0", "!", "-perm", "/044")


def digests(text: str) -> dict[str, str]:
    return {path: digest for digest, _, path in (line.partition("  ") for line in text.splitlines())}


def visible_secrets(machine: NamespaceMachine) -> list[str]:
    """Files for root only that root of the sandbox can read unchanged."""
    outside = files_for_root_only(machine)
    assert {"/var/lib/remuda/agent.env", "/etc/shadow", "/etc/sudoers"} <= outside.keys() | {"/etc/shadow"}
    paths = "".join(f"{path}\n" for path in outside)
    inside = digests(machine.run_in_sandbox("xargs", "-d", r"\n", "sha256sum", stdin=paths).stdout)
    same = [path for path, digest in inside.items() if outside[path] == digest]
    return [path for path in same if not any(PurePosixPath(path).match(pattern) for pattern in NEEDED)]


def unexpected_units(machine: NamespaceMachine) -> list[str]:
    command = (
        "systemctl",
        "list-units",
        "--type=service,timer,socket,path",
        "--state=active",
        "--plain",
        "--no-legend",
    )
    units = [line.split()[0] for line in machine.run_in_sandbox(*command).stdout.splitlines()]
    assert "dbus.service" in units
    return [unit for unit in units if not any(fnmatch(unit, pattern) for pattern in UNITS)]


async def test_host_is_hidden_and_typical_workflows_are_followed_by_reuse(machine_stack: MachineStack) -> None:
    await machine_stack.refresh(REMUDA_MARGIN_SEC="0.5")
    async with machine_stack.booting():
        created = reused = 0
        for run_id in ("1", "2", "3"):
            provisioned = await machine_stack.provision(run_id)
            created, reused = created + provisioned["created"], reused + provisioned["reused"]
            ((name, machine),) = machine_stack.machines.items()
            if run_id == "1":
                await until(lambda machine=machine: machine.has_sandbox, within_s=LIMIT_S)
                assert visible_secrets(machine) == []
                assert unexpected_units(machine) == []
                has_docker = machine.run("sh", "-c", "command -v dockerd").returncode == 0
            job = await machine_stack.run_job(run_id, WORKFLOW, *([DOCKER_WORKFLOW] if has_docker else []))
            assert job.conclusion == "success", f"{job.log} {machine.console}"
            released = await machine_stack.remuda("release", "--run-id", run_id)
            assert released["released"] == [name], machine.console
        assert (created, reused) == (1, 2)
