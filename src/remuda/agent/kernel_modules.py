"""The kernel of an instance before its first sandbox: modules that jobs may need are loaded, then loading ends.

Limits that sandboxes share with the machine are raised, see `shared_limits`.

Root of a user namespace makes the kernel load modules: by `mount -t nfs`, `ip link add type gre`, or a socket of a rare
family. They stay until the machine ends, more code for the next run to attack, and some create network interfaces of
the machine. Only an agent in the first namespaces of its kernel does this; in a container the kernel belongs to others.
"""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from remuda import scripts
from remuda.agent import shared_limits

#: Loaded where the kernel has them and does not contain them already.
NEEDED = (
    # Sandboxes and their disks.
    *("overlay", "ext4", "xfs", "quota_v2", "quota_tree", "veth", "tun", "fuse", "autofs4", "binfmt_misc"),
    # Snaps of the machine, such as the SSM agent of Ubuntu.
    *("loop", "squashfs"),
    # Networks of docker, kind and k3d.
    *("bridge", "br_netfilter", "stp", "llc", "vxlan", "af_packet"),
    # iptables, in both of its versions, and nft.
    *("ip_tables", "iptable_filter", "iptable_nat", "iptable_mangle", "iptable_raw", "x_tables"),
    *("ip6_tables", "ip6table_filter", "ip6table_nat", "ip6table_mangle", "ip6table_raw"),
    *("nf_tables", "nft_compat", "nft_ct", "nft_nat", "nft_chain_nat", "nft_masq", "nft_redir", "nft_reject"),
    *("nft_reject_inet", "nft_reject_ipv4", "nft_reject_ipv6", "nft_fib", "nft_fib_inet", "nft_fib_ipv4"),
    *("nft_fib_ipv6", "nft_limit", "nft_log", "nft_numgen", "nft_hash", "nft_connlimit", "nft_counter", "nft_objref"),
    *("nf_conntrack", "nf_conntrack_netlink", "nf_conncount", "nf_nat", "nfnetlink", "nfnetlink_log", "nf_log_syslog"),
    *("nf_reject_ipv4", "nf_reject_ipv6", "ipt_REJECT", "ip6t_REJECT", "ipt_rpfilter", "ip6t_rpfilter"),
    *("xt_MASQUERADE", "xt_REDIRECT", "xt_nat", "xt_CT", "xt_LOG", "xt_NFLOG", "xt_TCPMSS", "xt_mark", "xt_connmark"),
    *("xt_addrtype", "xt_comment", "xt_connlimit", "xt_conntrack", "xt_hashlimit", "xt_limit"),
    *("xt_multiport", "xt_owner", "xt_physdev", "xt_recent", "xt_set", "xt_state"),
    *("xt_statistic", "xt_tcpudp"),
    *("ip_set", "ip_set_hash_ip", "ip_set_hash_ipport", "ip_set_hash_net", "ip_set_hash_netport"),
    # ss.
    *("inet_diag", "tcp_diag", "udp_diag", "unix_diag", "netlink_diag"),
)
#: Seconds in which they must be loaded. Machines under emulation need ten.
LOAD_LIMIT_S = 120.0
#: The inode of the first PID namespace of every kernel: PROC_PID_INIT_INO in include/linux/proc_ns.h.
_FIRST_PID_NAMESPACE = "pid:[4026531836]"
_SETTINGS = Path("/proc/sys/kernel")
#: A file in the folder of the process that ends, and thus in its sandbox. Ubuntu's pattern starts a program outside.
_CORE_PATTERN = "core"


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelModules:
    #: Loaded in addition.
    further: tuple[str, ...] = ()
    #: Whether jobs may make the kernel load modules.
    are_open: bool = False

    def prepare(self) -> None:
        """Call this before each sandbox is made. Raises `OSError` if the kernel refuses."""
        if not _owns_kernel():
            return
        pattern = _SETTINGS / "core_pattern"
        if _read(pattern) != _CORE_PATTERN:
            # At first, or because a service of the machine has started late.
            pattern.write_text(_CORE_PATTERN, encoding="ascii")
        closed = _SETTINGS / "modules_disabled"
        if not self.are_open and closed.exists() and _read(closed) != "1":
            self._load()
            closed.write_text("1", encoding="ascii")
        shared_limits.raise_all()

    def _load(self) -> None:
        """Load the modules that the kernel has, and that the image does not forbid."""
        program = shutil.which("modprobe", path=scripts.SYSTEM_PATH)
        if program is not None:
            command = (program, "--all", "--quiet", "--use-blacklist", "--", *NEEDED, *self.further)
            try:
                # Modules that the kernel does not have count as a failure, and do not prevent the others.
                subprocess.run(
                    command, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=LOAD_LIMIT_S
                )
            except subprocess.TimeoutExpired as problem:
                raise OSError(f"the kernel's modules are not loaded after {LOAD_LIMIT_S:.0f} s") from problem


def _owns_kernel() -> bool:
    """Whether this process is outside all containers."""
    return str(Path("/proc/self/ns/pid").readlink()) == _FIRST_PID_NAMESPACE


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace").strip()
