"""Isolation of the machine from a job in its sandbox, and the reuse of machines after typical workflows."""

from __future__ import annotations

import shutil
from fnmatch import fnmatch
from pathlib import PurePosixPath

import pytest

from tests.support.attacks import IMAGE
from tests.support.aws.ec2_machines import MachineStack
from tests.support.namespace_machine.machine import NamespaceMachine
from tests.support.namespace_machine.requirements import unsupported_reason

pytestmark = [
    pytest.mark.namespaces,
    pytest.mark.skipif(bool(unsupported_reason()), reason=unsupported_reason()),
    pytest.mark.timeout(900),
]

#: Folders in which the host keeps files for root only.
FOLDERS = ("/etc", "/root", "/home", "/boot", "/var/cache", "/var/log", "/var/mail", "/var/spool", "/var/lib/remuda")
#: Files for root only that programs in a sandbox need. They contain no secret.
NEEDED = ("/etc/sudoers", "/etc/sudoers.d/*", "/var/cache/ldconfig/aux-cache")
#: Arguments of find: files of root that not everybody can read.
ROOT_ONLY = ("-type", "f", "-uid", "0", "-size", "+0", "!", "-perm", "-o=r")
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
printf '%s: 1\\n' Version Description Maintainer >pkg/DEBIAN/control
printf 'Package: typical\\nArchitecture: all\\n' >>pkg/DEBIAN/control
printf '#!/bin/sh\\necho typical\\n' >pkg/usr/bin/typical && chmod 755 pkg/usr/bin/typical
dpkg-deb --build --root-owner-group pkg typical.deb
sudo dpkg -i typical.deb
[ "$(typical)" = typical ]
sudo useradd --create-home extra
systemd-run --version >/dev/null && sudo systemd-run --wait --quiet true
"""
#: What docs/howto/not-supported.md says of the kernel, which all sandboxes share.
KERNEL_SETTINGS = """
set -x
sudo sh -c 'echo 1 >/proc/sys/net/ipv4/ip_forward' || exit 11
before=$(cat /proc/sys/vm/max_map_count)
! sudo sh -c 'echo 262144 >/proc/sys/vm/max_map_count' || exit 12
! sudo sh -c 'echo 9 >/proc/sys/fs/inotify/max_user_watches' || exit 13
[ "$(cat /proc/sys/vm/max_map_count)" = "$before" ] || exit 14
! sudo chrt --fifo 1 true || exit 15
! sudo mknod /tmp/null c 1 3 || exit 16
! sudo dmesg || exit 17
"""
#: For machines with docker.
DOCKER_WORKFLOW = f"""
set -x
! docker image inspect implant 2>/dev/null || exit 11
{IMAGE}
mkdir -p context && echo content >context/file
printf 'FROM implant\\nCOPY file /file\\nRUN cat /file >/built\\n' >context/Dockerfile
DOCKER_BUILDKIT=0 docker build -t built context
docker run -d --name service built sleep 1000
[ "$(docker exec service cat /built)" = content ]
"""


def files_for_root_only(machine: NamespaceMachine) -> dict[str, str]:
    """The digests of such files by path, on the machine outside its sandbox. Files of sandboxes do not count."""
    found = machine.run("find", *FOLDERS, "-path", "/var/lib/remuda/sandboxes", "-prune", "-o", *ROOT_ONLY, "-print")
    return digests(machine.run("xargs", "-d", r"\n", "sha256sum", stdin=found.stdout).stdout)


def digests(text: str) -> dict[str, str]:
    return {path: digest for digest, _, path in (line.partition("  ") for line in text.splitlines())}


def visible_secrets(machine: NamespaceMachine) -> list[str]:
    """Files for root only that root of the sandbox can read unchanged."""
    outside = files_for_root_only(machine)
    assert {"/var/lib/remuda/agent.env", "/var/lib/remuda/state.json"} <= outside.keys()
    paths = "".join(f"{path}\n" for path in outside)
    inside = digests(machine.run_in_sandbox("xargs", "-d", r"\n", "sha256sum", stdin=paths).stdout)
    same = [path for path, digest in inside.items() if outside[path] == digest]
    assert "/etc/sudoers" in same, "the check works"
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
            job = await machine_stack.run_job(
                run_id, WORKFLOW, KERNEL_SETTINGS, *([DOCKER_WORKFLOW] if shutil.which("dockerd") else [])
            )
            assert job.conclusion == "success", f"{job.log} {machine.console}"
            assert visible_secrets(machine) == []
            assert unexpected_units(machine) == []
            released = await machine_stack.remuda("release", "--run-id", run_id)
            assert released["released"] == [name], machine.console
        assert (created, reused) == (1, 2)
