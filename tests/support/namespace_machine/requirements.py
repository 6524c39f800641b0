"""Requirements of machines in Linux namespaces on this computer.

    python -m tests.support.namespace_machine.requirements

fails with a sentence if something is missing. It needs no installed package, so that `make demo-aws` can refuse first.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import cache

UNSHARE = ("unshare", "--mount", "--pid", "--ipc", "--uts", "--net", "--fork", "--kill-child=KILL")
#: Commands that sandboxes need, and their Debian packages.
NEEDED = {"systemd-nspawn": "systemd-container", "ip": "iproute2", "iptables": "iptables", "sudo": "sudo"}


@cache
def unsupported_reason() -> str:
    """The reason why this computer cannot run such machines; empty if it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "machines in namespaces need root on Linux"
    missing = [package for command, package in NEEDED.items() if shutil.which(command) is None]
    if missing:
        return f"machines in namespaces need {', '.join(missing)} (Debian: apt-get install {' '.join(missing)})"
    probe = (
        "set -e; mount -t cgroup2 none /mnt; umount /mnt; mount -t tmpfs t /mnt; mkdir /mnt/u /mnt/w /mnt/r;"
        " mount -t overlay o -o lowerdir=/,upperdir=/mnt/u,workdir=/mnt/w /mnt/r;"
        " ip link add name one type veth peer name two; iptables -t nat -S; iptables -t mangle -S"
    )
    done = subprocess.run([*UNSHARE, "sh", "-c", probe], capture_output=True, text=True, check=False)
    if done.returncode:
        return f"machines in namespaces need cgroup v2, overlays, veth and iptables: {done.stderr.strip()}"
    return ""


def main() -> int:
    reason = unsupported_reason()
    if reason:
        sys.stderr.write(f"this cannot run here: {reason}; nothing was installed\n")
    return 2 if reason else 0


if __name__ == "__main__":
    sys.exit(main())
