"""Attacks of a job on its machine and on the next run there.

Each attack is a few lines of bash. Most run as root of the sandbox: `plant` in a job of the first run, `look` in a
later job. `look` succeeds if the implant is still there. Escapes are attacks whose `plant` must fail.
"""

# Paths of the tested sandbox, and commands of several lines in tuples.
# ruff: noqa: S108, ISC004

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from tests.support import blocked_readers
from tests.support.namespace_machine.machine import INTERPRETER

HOME = "/home/runner"
RUNNER = "/opt/remuda/runner"
WORK = f"{HOME}/work"
#: Part of every file that an attack plants.
MARK = "remuda-implant"
#: Seconds until a process must run. Generous: only a broken attack reaches it.
LIMIT_S = 60


class AttackOutcome(StrEnum):
    REMOVED = "removed"
    REFUSED = "refused"
    SEEN = "SEEN BY THE NEXT RUN"
    ESCAPED = "ESCAPED"
    NOT_SUPPORTED = "not supported by the test computer"


@dataclass(frozen=True, kw_only=True)
class Attack:
    name: str
    #: Description for the table in the docs.
    what: str
    plant: str
    #: Empty for an escape.
    look: str = ""
    #: A command that fails if this computer does not support the attack.
    needs: str = ":"
    #: Whether it runs as the user of jobs instead of root.
    as_job_user: bool = False


def file(name: str, what: str, *paths: str, content: str = "", mode: str = "644") -> Attack:
    every = " ".join(paths)
    plant = (
        f'for path in {every}; do mkdir -p "$(dirname "$path")"; '
        f"printf '%s\\n' '{content}#{MARK}' >\"$path\"; chmod {mode} \"$path\"; done"
    )
    return Attack(name=name, what=what, plant=plant, look=f"grep -qs {MARK} {every}")


def process(name: str, what: str, plant: str, command: str) -> Attack:
    wait = f"SECONDS=0; until runs '^{command}'; do [ $SECONDS -lt {LIMIT_S} ]; done"
    return Attack(name=name, what=what, plant=f"{plant}\n{wait}", look=f"runs '^{command}'")


def python(code: str) -> str:
    return f"py <<'END'\n{code.strip()}\nEND"


def daemon(code: str) -> str:
    """Start a program in the background and wait until it prints "ready"."""
    return (
        "me=$TMPDIR/$BASHPID\n"
        f"cat >$me.py <<'END'\n{code.strip()}\nEND\n"
        "mkfifo $me.ready\n"
        'setsid "$PYTHON" -IS $me.py >$me.ready 2>/dev/null </dev/null &\n'
        'read -r word <$me.ready && [ "$word" = ready ]'
    )


def listening(name: str, then: str, family: str = "AF_UNIX") -> str:
    """Start a daemon with a listening socket. `name` is a Python expression."""
    return daemon(f"""
import os, signal, socket
server = socket.socket(socket.{family})
server.bind({name})
server.listen()
os.write(1, b"ready\\n")
os.close(1)
{then}
""")


def holding(name: str, code: str) -> str:
    """Start a daemon that listens on an abstract socket, runs code, and keeps what that has made."""
    return daemon(f"""
import ctypes, os, signal, socket
libc = ctypes.CDLL(None)
server = socket.socket(socket.AF_UNIX)
server.bind({abstract(name)})
server.listen()
{code}
os.write(1, b"ready\\n")
os.close(1)
signal.pause()
""")


def abstract(name: str) -> str:
    """The address of an abstract socket."""
    return f"chr(0) + '{name}'"


def connects(name: str, family: str = "AF_UNIX") -> str:
    return python(f"import os, socket\nsocket.socket(socket.{family}).connect({name})")


#: Functions for kernel keys, for which no command may be installed.
_KEYS = """
import ctypes, platform, sys
libc = ctypes.CDLL(None, use_errno=True)
add, keyctl = {"x86_64": (248, 250), "aarch64": (217, 219)}[platform.machine()]
def key(ring, name=b"implant"):
    assert libc.syscall(add, b"user", name, b"x", 1, ring) > 0
def persistent():
    return libc.syscall(keyctl, 22, -1, -2, 0, 0)
def has(ring):
    assert libc.syscall(keyctl, 10, ring, b"user", b"implant", 0) > 0
"""
_QUEUE = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
assert libc.mq_open(b"/implant", os.O_RDWR | {flags}, 0o600, None) >= 0
"""
_ACL = (
    "import os, struct\n"
    "none = 2**32 - 1\n"
    "rights = ((1, 7, none), (2, 7, 1), (4, 5, none), (16, 7, none), (32, 5, none))\n"
    "text = struct.pack('<I', 2) + b''.join(struct.pack('<HHI', *each) for each in rights)\n"
)
_SYSTEM_CALL = """
import ctypes, os, platform, sys
libc = ctypes.CDLL(None, use_errno=True)
numbers = {numbers}[platform.machine()]
"""

#: Each identifier of an echo request is a connection of its own. Counts the answers.
_PINGS = """
import os, select, socket, struct, sys, time
from urllib.parse import urlsplit
def pings(number):
    raw = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
    raw.connect((urlsplit(os.environ["GITHUB_API_URL"]).hostname, 0))
    answered = set()
    for key in range(number):
        raw.send(struct.pack("!BBHHH", 8, 0, 0xFFFF - 0x800 - key if key < 0xF7FF else 0, key, 0))
        wait = 0 if key % 50 and key < number - 1 else 1 if key == number - 1 else 0.01
        while select.select([raw], [], [], wait)[0]:
            packet = raw.recv(100)
            if packet[20] == 0: answered.add(packet[24:26])
    return len(answered)
"""

IN_HOME = (
    file(
        "shell start file",
        "`.bashrc` with `LD_PRELOAD`",
        "/home/runner/.bashrc",
        content="export LD_PRELOAD=/tmp/x.so ",
    ),
    file("login file", "`.profile`, `.bash_login`", "/home/runner/.profile", "/home/runner/.bash_login"),
    file(
        "session environment",
        "`.pam_environment`, `environment.d`: `BASH_ENV`",
        "/home/runner/.pam_environment",
        "/home/runner/.config/environment.d/x.conf",
    ),
    file("git configuration", "`.gitconfig`: `core.hooksPath`, `credential.helper`", "/home/runner/.gitconfig"),
    file("git hooks of the user", "`.config/git/hooks`", "/home/runner/.config/git/hooks/post-checkout"),
    file("git credentials", "`.git-credentials`", "/home/runner/.git-credentials"),
    file("npm configuration", "`.npmrc`: another registry", "/home/runner/.npmrc"),
    file("pip configuration", "`pip.conf`: another index", "/home/runner/.config/pip/pip.conf"),
    file("Maven settings", "`.m2/settings.xml`: a mirror", "/home/runner/.m2/settings.xml"),
    file("cargo configuration", "`.cargo/config.toml`: a wrapper of `rustc`", "/home/runner/.cargo/config.toml"),
    file(
        "Python start file",
        "`usercustomize.py` in the user's packages",
        "/home/runner/.local/lib/python3/usercustomize.py",
    ),
    file("authorised keys", "`.ssh/authorized_keys`", "/home/runner/.ssh/authorized_keys", mode="600"),
    file("ssh configuration", "`.ssh/config`: `ProxyCommand`", "/home/runner/.ssh/config", mode="600"),
    file("netrc", "`.netrc`", "/home/runner/.netrc", mode="600"),
    file("docker credentials", "`.docker/config.json`: a credential helper", "/home/runner/.docker/config.json"),
    file(
        "cloud credentials",
        "`.aws/credentials`, `.kube/config`, those of `gh`",
        "/home/runner/.aws/credentials",
        "/home/runner/.kube/config",
        "/home/runner/.config/gh/hosts.yml",
        mode="600",
    ),
    file("shim in the user's PATH", "`/home/runner/.local/bin/git`", "/home/runner/.local/bin/git", mode="755"),
    file(
        "systemd user unit",
        "a unit in `.config/systemd/user`",
        "/home/runner/.config/systemd/user/default.target.wants/x.service",
    ),
    Attack(
        name="modes of the home folder",
        what="writable for all users",
        plant=f"chmod 0777 {HOME}",
        look=f'[ "$(stat -c %a {HOME})" = 777 ]',
    ),
    Attack(
        name="access list of the home folder",
        what="a default access list, which new files would inherit",
        plant=python(f'{_ACL}os.setxattr("{HOME}", "system.posix_acl_default", text)'),
        look=python(f'import os\nos.getxattr("{HOME}", "system.posix_acl_default")'),
    ),
)
IN_THE_RUNNER = (
    file("variables of the runner", "`.env`: `BASH_ENV`", f"{RUNNER}/.env", content="BASH_ENV=/tmp/x"),
    file("path of the runner", "`.path`: a folder of the job comes first", f"{RUNNER}/.path", content="/tmp/bin"),
    file("registration", "a copy of the run's `.credentials`", f"{RUNNER}/.credentials.kept"),
    file("job hook", "a script for `ACTIONS_RUNNER_HOOK_JOB_STARTED`", f"{RUNNER}/hooks/started.sh", mode="755"),
    file("shim in the runner", "`externals/node20/bin/node`", f"{RUNNER}/externals/node20/bin/node", mode="755"),
    Attack(
        name="changed start script",
        what="a line in `run.sh`",
        plant=f"echo '#remuda-implant' >>{RUNNER}/run.sh",
        look=f"grep -q remuda-implant {RUNNER}/run.sh",
    ),
    Attack(
        name="changed program",
        what="a line in `bin/Runner.Listener`",
        plant=f"echo '#remuda-implant' >>{RUNNER}/bin/Runner.Listener",
        look=f"grep -q remuda-implant {RUNNER}/bin/Runner.Listener",
    ),
    Attack(
        name="attribute of a program",
        what="an extended attribute of `config.sh`",
        plant=python(f'import os\nos.setxattr("{RUNNER}/config.sh", "user.implant", b"1")'),
        look=python(f'import os\nos.getxattr("{RUNNER}/config.sh", "user.implant")'),
    ),
    Attack(
        name="access list of the runner",
        what="a default access list of its folder: later files are writable for another user",
        plant=python(f'{_ACL}os.setxattr("{RUNNER}", "system.posix_acl_default", text)'),
        look=python(f'import os\nos.getxattr("{RUNNER}", "system.posix_acl_default")'),
    ),
    Attack(
        name="link in place of a folder",
        what="`bin` of the runner is a link to another folder",
        plant=f"mv {RUNNER}/bin {RUNNER}/other && ln -s other {RUNNER}/bin",
        look=f"test -L {RUNNER}/bin",
    ),
    file("poisoned tool cache", "`_tool/node/20/x64/bin/node`", f"{WORK}/_tool/node/20/x64/bin/node", mode="755"),
    file("poisoned action", "`_actions/actions/checkout/v4`", f"{WORK}/_actions/actions/checkout/v4/dist/index.js"),
    file(
        "hook in a checkout", "`.git/hooks` of the workspace", f"{WORK}/repo/repo/.git/hooks/post-checkout", mode="755"
    ),
)
IN_SHARED_FOLDERS = (
    file("hidden file", "a dot file in `/tmp`", "/tmp/.implant"),
    file("file in /var/tmp", "survives a reboot", "/var/tmp/implant"),
    file("shared memory", "a file in `/dev/shm`", "/dev/shm/implant"),
    file("lock folder", "a file in `/run/lock`", "/run/lock/implant"),
    Attack(
        name="setuid program",
        what="a shell with the setuid bit in `/var/tmp`",
        plant="cp /bin/sh /var/tmp/sh && chmod 6755 /var/tmp/sh",
        look="test -u /var/tmp/sh",
    ),
    Attack(
        name="closed folder",
        what="mode 000, with files in it",
        plant="mkdir -p /var/tmp/closed/in && touch /var/tmp/closed/in/file && chmod 000 /var/tmp/closed",
        look="test -d /var/tmp/closed",
    ),
    Attack(
        name="link to a system folder",
        what="`/tmp/etc`, which a recursive removal might follow",
        plant="ln -s /etc /tmp/etc",
        look="test -L /tmp/etc",
    ),
    Attack(
        name="malformed file names",
        what="line breaks, escape sequences, bytes that are not UTF-8",
        plant="touch $'/tmp/new\\nline' $'/tmp/\\xff\\xfe' $'/tmp/\\e[2J' /tmp/-rf",
        look="test -e $'/tmp/new\\nline' || test -e $'/tmp/\\xff\\xfe' || test -e $'/tmp/\\e[2J' || test -e /tmp/-rf",
    ),
    Attack(
        name="tree deeper than the maximum path",
        what="400 folders of 20 letters below `/tmp/deep`",
        plant="mkdir /tmp/deep && cd /tmp/deep && for i in $(seq 400); do mkdir dddddddddddddddddddd && cd -P d*; done",
        look="test -d /tmp/deep",
    ),
    Attack(name="named pipe", what="in `/tmp`", plant="mkfifo /tmp/pipe", look="test -p /tmp/pipe"),
    Attack(
        name="listening socket",
        what="like those of tmux or ssh-agent, in `/tmp`, with its process",
        plant=listening("'/tmp/socket'", "signal.pause()"),
        look=connects("'/tmp/socket'"),
    ),
    Attack(
        name="abstract socket",
        what="a socket without a file",
        plant=listening(abstract("implant"), "signal.pause()"),
        look=connects(abstract("implant")),
    ),
    Attack(
        name="large sparse file",
        what="a terabyte in `/var/tmp`",
        plant="truncate -s 1T /var/tmp/large",
        look="test -e /var/tmp/large",
    ),
    Attack(
        name="blocks beyond the end of a file",
        what="64 MiB that no size shows, in the home folder",
        plant=f"touch {HOME}/empty && fallocate --keep-size --length 64M {HOME}/empty",
        look=f'[ "$(stat -c %b {HOME}/empty)" -gt 100000 ]',
    ),
    Attack(
        name="file times",
        what="a message in the times of `/usr/bin/true`",
        plant="touch -d @123456789.987654321 /usr/bin/true",
        look='[ "$(stat -c %Y /usr/bin/true)" = 123456789 ]',
    ),
    Attack(
        name="inode flags",
        what="`chattr +d +A` on files of the home folder and of the system",
        plant=f"touch {HOME}/flagged && chattr +dA {HOME}/flagged && chattr +d /etc/hosts",
        look=f"lsattr {HOME}/flagged /etc/hosts | grep -q '^[-A]*d'",
    ),
    Attack(
        name="list of the job hook",
        what="a line in the file that the agent reads",
        plant=f"echo {MARK} >>/run/remuda/.remuda-refused",
        look=f"grep -qs {MARK} /run/remuda/.remuda-refused",
    ),
    Attack(
        name="memory disk",
        what="a mounted tmpfs, and a hugetlbfs where the kernel permits it",
        plant="mkdir -p /mnt/t /mnt/h && mount -t tmpfs t /mnt/t && touch /mnt/t/file; "
        "mount -t hugetlbfs h /mnt/h || true",
        look="test -e /mnt/t/file || grep -q hugetlbfs.*/mnt/h /proc/mounts",
        needs="grep -q hugetlbfs /proc/filesystems",
    ),
)
IN_THE_SYSTEM = (
    file("preloaded library", "`/etc/ld.so.preload`: only a comment here", "/etc/ld.so.preload"),
    file("system profile", "`/etc/profile.d`, `/etc/environment`", "/etc/profile.d/x.sh", "/etc/environment"),
    file("system program", "a shim in `/usr/local/bin` and in `/usr/bin`", "/usr/local/bin/git", "/usr/bin/implant"),
    file("name resolution", "`/etc/hosts`", "/etc/hosts"),
    file("package sources", "`/etc/apt`: another mirror", "/etc/apt/sources.list.d/x.list", "/etc/apt/apt.conf.d/x"),
    file("trusted certificates", "`/usr/local/share/ca-certificates`", "/usr/local/share/ca-certificates/x.crt"),
    file("docker settings", "`/etc/docker/daemon.json`: another registry", "/etc/docker/x.json"),
    file("kernel modules to load", "`/etc/modules-load.d`", "/etc/modules-load.d/x.conf"),
    file("files of root", "`/root/.bashrc`, `/root/.ssh`", "/root/.bashrc", "/root/.ssh/authorized_keys"),
    Attack(
        name="further administrator",
        what="a user with id 0, a group member and a rule of sudo",
        plant="echo 'implant:x:0:0::/:/bin/sh' >>/etc/passwd; echo 'implant:x:4711:runner' >>/etc/group; "
        "echo 'ALL ALL=(ALL) NOPASSWD: ALL #implant' >/etc/sudoers.d/implant",
        look="grep -rqs implant /etc/passwd /etc/group /etc/sudoers.d",
    ),
    Attack(
        name="job user leaves the docker group",
        what="so that a check of its groups would find nothing",
        plant="sed -i 's/^docker:.*/docker:x:4712:/' /etc/group",
        look="grep -q ^docker:x:4712: /etc/group",
        needs="grep -q ^docker: /etc/group",
    ),
    Attack(
        name="setuid root program",
        what="a copy of the shell in `/usr/bin`, owned by root, and one with file capabilities",
        plant="cp /bin/sh /usr/bin/rootsh && chmod 6755 /usr/bin/rootsh",
        look="test -u /usr/bin/rootsh",
    ),
    Attack(
        name="replaced system program",
        what="`/usr/bin/env` is another program",
        plant="cp /usr/bin/env /usr/bin/env.old && echo '#!/bin/sh' >/usr/bin/env.new && "
        "echo 'exec /usr/bin/env.old \"$@\" #implant' >>/usr/bin/env.new && chmod 755 /usr/bin/env.new && "
        "mv /usr/bin/env.new /usr/bin/env",
        look="grep -q implant /usr/bin/env",
    ),
    Attack(
        name="removed system folder",
        what="`/usr/share/doc` is gone",
        plant="rm -rf /usr/share/doc",
        look="test ! -e /usr/share/doc",
        needs="test -e /usr/share/doc",
    ),
)
IN_THE_KERNEL = (
    Attack(name="System V shared memory", what="a segment", plant="ipcmk -M 4711", look="ipcs -m | grep -qw 4711"),
    Attack(name="System V semaphores", what="a set", plant="ipcmk -S 47", look="ipcs -s | grep -qw 47"),
    Attack(name="System V queue", what="a queue", plant="ipcmk -Q", look='[ "$(ipcs -q | grep -c ^0x)" -gt 0 ]'),
    Attack(
        name="POSIX message queue",
        what="`/implant`",
        plant=python(_QUEUE.format(flags="os.O_CREAT")),
        look=python(_QUEUE.format(flags="0")),
    ),
    Attack(
        name="inherited session key",
        what="a kernel key in the session keyring that the listener got from the agent",
        plant=python(f"{_KEYS}key(-3)"),
        look=python(f"{_KEYS}has(-3)"),
        as_job_user=True,
    ),
    Attack(
        name="kernel key of the job user",
        what="in the keyring of the user",
        plant=python(f"{_KEYS}key(-4)"),
        look=python(f"{_KEYS}has(-4)"),
        as_job_user=True,
    ),
    Attack(
        name="kernel key of root",
        what="in the keyring of root",
        plant=python(f"{_KEYS}key(-4)"),
        look=python(f"{_KEYS}has(-4)"),
    ),
    Attack(
        name="persistent key",
        what="in the keyring that survives all sessions",
        plant=python(f"{_KEYS}key(persistent())"),
        look=python(f"{_KEYS}has(persistent())"),
        needs=python(f"{_KEYS}assert persistent() > 0"),
    ),
    Attack(
        name="key quota",
        what="keys until the user may add no more",
        plant=python(
            f"{_KEYS}for n in range(250):\n"
            "    if libc.syscall(add, b'user', b'%d' % n, b'x', 1, -4) < 0: break\nelse: sys.exit(1)"
        ),
        # The end of the first job's session has freed some.
        look=python(
            f"{_KEYS}sys.exit(all(libc.syscall(add, b'user', b'more%d' % n, b'x', 1, -4) > 0 for n in range(20)))"
        ),
        as_job_user=True,
    ),
    Attack(
        name="network interface",
        what="a pair of interfaces with an address",
        plant="ip link add implant type veth peer name implant2 && ip address add 192.0.2.77/32 dev implant",
        look="ip link show implant",
    ),
    Attack(
        name="packet filter",
        what="rules of iptables that redirect connections",
        plant="iptables -t nat -A OUTPUT -d 192.0.2.78 -j REDIRECT",
        look="iptables -t nat -S OUTPUT | grep -q 192.0.2.78",
    ),
    Attack(
        name="network settings",
        what="`net.ipv4.ip_unprivileged_port_start`",
        plant="sysctl -qw net.ipv4.ip_unprivileged_port_start=7",
        look='[ "$(sysctl -n net.ipv4.ip_unprivileged_port_start)" = 7 ]',
    ),
    Attack(
        name="TCP server",
        what="on port 2375, in front of the docker socket",
        plant=listening("('0.0.0.0', 2375)", "signal.pause()", "AF_INET"),
        look=connects("('127.0.0.1', 2375)", "AF_INET"),
    ),
    Attack(
        name="SCTP server",
        what="a listening socket of a protocol that is rarely used",
        plant=listening("('0.0.0.0', 4713)", "signal.pause()", "AF_INET, socket.SOCK_STREAM, 132"),
        look=python(
            "import socket\nsocket.socket(socket.AF_INET, socket.SOCK_STREAM, 132).connect(('127.0.0.1', 4713))"
        ),
        needs=python("import socket\nsocket.socket(socket.AF_INET, socket.SOCK_STREAM, 132)"),
    ),
    Attack(
        name="neighbours, routes and rules",
        what="permanent ones, which lead packets elsewhere",
        plant="ip neigh replace 192.0.2.79 lladdr 02:00:00:00:00:01 dev host0 nud permanent\n"
        "ip route add 192.0.2.80/32 dev lo\nip rule add to 192.0.2.81/32 table 77",
        look="ip neigh show nud permanent | grep -q 192.0.2.79 || ip route show | grep -q 192.0.2.80 || "
        "ip rule show | grep -q 192.0.2.81",
    ),
    Attack(
        name="bridge with a forwarding database",
        what="and a permanent entry in it",
        plant="ip link add implant-br type bridge && bridge fdb add 02:00:00:00:00:02 dev implant-br self permanent",
        look="bridge fdb show | grep -q 02:00:00:00:00:02 || ip link show implant-br",
        needs="command -v bridge",
    ),
    Attack(
        name="tap device",
        what="a persistent one",
        plant="ip tuntap add dev implant-tap mode tap",
        look="ip link show implant-tap",
        needs="ip tuntap add dev probe-tap mode tap && ip tuntap del dev probe-tap mode tap",
    ),
    Attack(
        name="traffic control",
        what="a queueing discipline that limits the sandbox's interface",
        plant="tc qdisc replace dev host0 root tbf rate 1gbit burst 1mb latency 1s",
        look="tc qdisc show dev host0 | grep -q tbf",
        needs="tc qdisc add dev lo root tbf rate 1gbit burst 1mb latency 1s && tc qdisc del dev lo root",
    ),
    Attack(
        name="network namespace",
        what="with a name, which keeps it without a process",
        plant="ip netns add implant",
        look="ip netns list | grep -q implant",
    ),
    Attack(
        name="many network namespaces",
        what="900, each of which the kernel has to take apart",
        plant=holding(
            "networks",
            "kept = []\nfor _ in range(900):\n    libc.unshare(0x40000000)\n"
            "    kept.append(os.open('/proc/self/ns/net', os.O_RDONLY))",
        ),
        look=connects(abstract("networks")),
    ),
    Attack(
        name="mounts that multiply",
        what="a shared mount on itself: each one doubles their number, up to 8,192",
        plant=holding(
            "mounts",
            "libc.unshare(0x20000)\nlibc.mount(None, b'/', None, 0x44000, None)\n"
            "assert not libc.mount(b't', b'/mnt', b'tmpfs', 0, None)\nlibc.mount(None, b'/mnt', None, 1 << 20, None)\n"
            "for _ in range(13):\n    assert not libc.mount(b'/mnt', b'/mnt', None, 4096, None)",
        ),
        look=connects(abstract("mounts")),
    ),
    Attack(
        name="format of programs",
        what="registered with `binfmt_misc`: files of a format start a program",
        plant="mkdir -p /mnt/b && mount -t binfmt_misc b /mnt/b && "
        "echo ':implant:M::implant::/bin/true:' >/mnt/b/register",
        look="mkdir -p /mnt/b; mount -t binfmt_misc b /mnt/b; test -e /mnt/b/implant",
        needs="mkdir -p /mnt/b && mount -t binfmt_misc b /mnt/b && umount /mnt/b",
    ),
    Attack(
        name="cgroups",
        what="200 cgroups with processes in them",
        plant="for i in $(seq 200); do mkdir -p /sys/fs/cgroup/implant/$i; done\n"
        "sleep 1009 >/dev/null 2>&1 </dev/null & echo $! >/sys/fs/cgroup/implant/7/cgroup.procs",
        look="test -e /sys/fs/cgroup/implant/7",
    ),
)
SCHEDULED = (
    file("crontab", "in the spool folder, and in `/etc/cron.d`", "/var/spool/cron/crontabs/runner", "/etc/cron.d/x"),
    file("at job", "in the spool folder", "/var/spool/cron/atjobs/a00001"),
    file("lingering login", "`loginctl enable-linger`: its file", "/var/lib/systemd/linger/runner"),
    file("mailbox", "a mail that triggers `.forward` or a filter", "/var/mail/runner"),
    Attack(
        name="system service",
        what="a unit in `/etc/systemd/system`, enabled and started",
        plant="printf '[Service]\\nExecStart=sleep 1010\\nRestart=always\\n[Install]\\nWantedBy=remuda.target\\n' "
        ">/etc/systemd/system/implant.service && systemctl daemon-reload && systemctl enable --now implant.service",
        look="systemctl is-enabled implant.service || systemctl is-active implant.service",
    ),
    Attack(
        name="timer",
        what="a transient unit that starts later",
        plant="systemd-run --unit=implant-timer --on-active=3600 true",
        look="systemctl is-active implant-timer.timer",
    ),
    Attack(
        name="shutdown",
        what="scheduled for later",
        plant="systemd-run --unit=implant-off --on-active=3600 systemctl poweroff",
        look="systemctl is-active implant-off.timer",
    ),
)
_DOCKER = "docker info"
CONTAINERS = (
    Attack(
        name="privileged container",
        what="`docker run --privileged --pid=host --net=host -v /:/host`, which changes `/etc` and keeps running",
        plant="docker run -d --privileged --pid=host --net=host -v /:/host implant sh -c "
        "'echo implant >/host/etc/implant-docker; exec sleep 1011'",
        look="test -e /etc/implant-docker || runs 'sleep 1011'",
        needs=_DOCKER,
    ),
    Attack(
        name="service container",
        what="restarted always",
        plant="docker run -d --restart=always --name service implant sleep 1012",
        look="docker inspect service",
        needs=_DOCKER,
    ),
    Attack(
        name="docker objects",
        what="an image, a volume and a network",
        plant="docker volume create implant && docker network create implant",
        look="docker image inspect implant || docker volume inspect implant || docker network inspect implant",
        needs=_DOCKER,
    ),
    Attack(
        name="access list of the docker socket",
        what="for another user",
        plant=python(f'{_ACL}os.setxattr("/run/docker.sock", "system.posix_acl_access", text)'),
        look=python('import os\nos.getxattr("/run/docker.sock", "system.posix_acl_access")'),
        needs=_DOCKER,
    ),
    Attack(
        name="containerd",
        what="a namespace made through its socket",
        plant="ctr namespaces create implant",
        look="ctr namespaces list | grep -q implant",
        needs=f"command -v ctr && {_DOCKER}",
    ),
)
PROCESSES = (
    process(
        "background process",
        "started by a step",
        "sleep 1001 >/dev/null 2>&1 </dev/null &",
        "sleep 1001",
    ),
    process(
        "nohup",
        "ignores SIGHUP",
        "nohup sleep 1002 >/dev/null 2>&1 </dev/null &",
        "sleep 1002",
    ),
    process(
        "new session",
        "`setsid`, two forks, an empty environment, folder `/`",
        "(cd / && env -i setsid sh -c 'sleep 1003 & sleep 1004 &' >/dev/null 2>&1 </dev/null)",
        "sleep 100[34]",
    ),
    process(
        "process that ignores signals",
        "all signals that can be ignored",
        "cd / && env -i setsid bash -c 'trap \"\" TERM INT HUP QUIT; sleep 1005; :' >/dev/null 2>&1 </dev/null &",
        "sleep 1005",
    ),
    process(
        "stopped process",
        "stopped by SIGSTOP",
        "env -i setsid sleep 1006 >/dev/null 2>&1 </dev/null &\nuntil pkill -STOP -f '^sleep 1006'; do :; done",
        "sleep 1006",
    ),
    Attack(
        name="container without a runtime",
        what="user, mount and PID namespaces with a mount",
        plant="mkfifo $TMPDIR/mounted\n"
        "env -i setsid unshare -Urmpf sh -c 'mount -t tmpfs t /mnt && echo >$1 && exec sleep 1007' - $TMPDIR/mounted"
        " >/dev/null 2>&1 </dev/null &\n"
        f"read -rt {LIMIT_S} <>$TMPDIR/mounted",
        look="runs 'sleep 1007'",
        needs="unshare -Urmpf true",
    ),
    Attack(
        name="process that waits for itself",
        what="a FUSE daemon that waits for its own answer, which not even SIGKILL ends",
        plant=holding("itself", blocked_readers.ITSELF.replace('"blocked"', '"ready"')),
        look=connects(abstract("itself")),
        needs="test -w /dev/fuse",
    ),
    Attack(
        name="constantly forking process",
        what="each process exists for a moment",
        plant=listening(
            abstract("race"), "while True:\n    if os.fork():\n        os._exit(0)\n    signal.sigtimedwait([], 0.0005)"
        ),
        look=connects(abstract("race")),
    ),
    Attack(
        name="process without main thread",
        what="the main thread has ended, another one runs",
        plant=listening(
            abstract("headless"),
            "import ctypes, threading\nthreading.Thread(target=signal.sigwait, args=([signal.SIGUSR1],)).start()\n"
            "ctypes.CDLL(None).pthread_exit(None)",
        ),
        look=connects(abstract("headless")),
    ),
    Attack(
        name="deleted file",
        what="held open by a process",
        plant=daemon(
            "import os, signal\nfile = open('/tmp/deleted', 'w')\nos.unlink('/tmp/deleted')\n"
            'os.write(1, b"ready\\n")\nos.close(1)\nsignal.pause()'
        ),
        look="ls -l /proc/[0-9]*/fd 2>/dev/null | grep -q '/tmp/deleted (deleted)'",
    ),
    Attack(
        name="watcher",
        what="a process that recreates its file as soon as it is removed",
        plant=daemon(
            "import os, signal\nopen('/tmp/watched', 'w').close()\n"
            'os.write(1, b"ready\\n")\nos.close(1)\n'
            "while True:\n    os.path.exists('/tmp/watched') or open('/tmp/watched', 'w').close()\n"
            "    signal.sigtimedwait([], 0.001)"
        ),
        look="test -e /tmp/watched",
    ),
    process(
        "process with a deceptive name",
        "named like a kernel thread",
        "env -i setsid bash -c 'exec -a \"[kworker/0:1-implant]\" sleep 1008' >/dev/null 2>&1 </dev/null &",
        ".kworker/0:1-implant",
    ),
)
#: Attacks that must fail. They write values that are there already, so that a success would do no harm.
_SET = 'value=$(cat {0}) && printf "%s" "$value" >{0}'
ESCAPES = tuple(
    Attack(name=name, what=what, plant=plant, needs=needs)
    for name, what, needs, plant in (
        (
            "core_pattern",
            "the program that the kernel runs for core dumps",
            ":",
            _SET.format("/proc/sys/kernel/core_pattern"),
        ),
        ("modprobe", "the program that the kernel runs to load modules", ":", _SET.format("/proc/sys/kernel/modprobe")),
        (
            "masked /proc/sys",
            "the same after `umount` and a new mount of `/proc`",
            ":",
            "umount -R /proc/sys; mkdir -p /mnt/p; mount -t proc p /mnt/p; "
            + _SET.format("/proc/sys/kernel/core_pattern")
            + " || "
            + _SET.format("/mnt/p/sys/kernel/core_pattern"),
        ),
        (
            "sysrq",
            "opening `/proc/sysrq-trigger` for writing",
            "test -e /proc/sysrq-trigger",
            ": >>/proc/sysrq-trigger",
        ),
        (
            "settings in /sys",
            "`uevent_helper` and block devices",
            ":",
            "mkdir -p /mnt/s; mount -t sysfs s /mnt/s; for path in /sys/kernel/uevent_helper "
            "/mnt/s/kernel/uevent_helper /mnt/s/block/*/queue/read_ahead_kb; do "
            + _SET.format("$path")
            + " && exit 0; done; exit 1",
        ),
        (
            "kernel module",
            "`init_module`",
            ":",
            python(
                _SYSTEM_CALL.format(numbers={"x86_64": 175, "aarch64": 105})
                + "libc.syscall(numbers, b'', 0, b'')\nsys.exit(ctypes.get_errno() in (1, 38))"
            ),
        ),
        (
            "kexec, swap and clock",
            "`kexec_load`, `swapon`, `clock_settime`",
            ":",
            "py <<'END' || (truncate -s 1M /tmp/swap; mkswap -q /tmp/swap; swapon /tmp/swap)\n"
            "import time\ntime.clock_settime(time.CLOCK_REALTIME, time.clock_gettime(time.CLOCK_REALTIME))\nEND",
        ),
        (
            "disk of the machine",
            "a device node of a disk, mounted or read",
            "ls /sys/class/block/*/dev",
            "IFS=: read -r major minor <$(ls /sys/class/block/*/dev | head -n 1); mknod /tmp/disk b $major $minor; "
            "head -c 512 /tmp/disk >/tmp/sector && test -s /tmp/sector || mount /tmp/disk /mnt",
        ),
        (
            "file handles",
            "`open_by_handle_at` on files outside the sandbox's root",
            ":",
            python(
                _SYSTEM_CALL.format(numbers={"x86_64": 304, "aarch64": 265})
                + "import struct\nhandle = struct.pack('Iiii', 8, 1, 2, 0)\n"
                "for path in ('/', '/var/lib/docker', '/run/remuda'):\n"
                "    found = libc.syscall(numbers, os.open(path, os.O_RDONLY), handle, os.O_RDONLY)\n"
                "    if found >= 0: sys.exit(0)\n"
                "sys.exit(1)"
            ),
        ),
        (
            "families of sockets",
            "VM sockets, which reach the hypervisor past the packet filter, XDP, crypto, SMC, Bluetooth and others",
            ":",
            python(
                "import socket, sys\n"
                "for family in (3, 4, 9, 15, 21, 24, 29, 30, 31, 32, 33, 38, 39, 40, 41, 42, 43, 44, 45):\n"
                "    for kind in (1, 2, 3, 5):\n"
                "        try: socket.socket(family, kind)\n"
                "        except OSError: continue\n"
                "        sys.exit(0)\n"
                "try: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 6)\n"
                "except OSError: sys.exit(1)"
            ),
        ),
        (
            "io_uring and userfaultfd",
            "a ring, which opens sockets without a system call for them, and the handling of page faults",
            ":",
            python(
                _SYSTEM_CALL.format(numbers={"x86_64": 323, "aarch64": 282})
                + "sys.exit(not (libc.syscall(425, 1, bytes(120)) >= 0 or libc.syscall(numbers, 1) >= 0))"
            ),
        ),
        (
            "modules by use",
            "file systems, interfaces and queueing disciplines for which the kernel would load a module",
            '[ "$(cat /proc/sys/kernel/modules_disabled)" = 1 ]',
            "cut -d ' ' -f 1 /proc/modules >/tmp/before\n"
            "for name in nfs cifs btrfs vfat; do mount -t $name none /mnt; done\n"
            "for name in wireguard gre sit dummy; do ip link add type $name; done\n"
            "tc qdisc add dev lo root sfq\n! cut -d ' ' -f 1 /proc/modules | cmp - /tmp/before",
        ),
        (
            "processes of the machine",
            "seeing, tracing or entering the agent or the first process of the machine",
            ":",
            "pgrep -f 'remuda agent' || grep -qa 'namespace_machine' /proc/[0-9]*/cmdline",
        ),
        (
            "root of the machine",
            "through `/proc/1/root`, `..`, and `pivot_root`",
            ":",
            "ls /proc/1/root/var/lib/remuda/* /proc/[0-9]*/root/var/lib/remuda/*.json /../var/lib/remuda/state.json",
        ),
        (
            "layers below the root",
            "mounting the lower layer or the state folder again",
            ":",
            "mkdir -p /mnt/l; mount --bind /var/lib/remuda /mnt/l && test -e /mnt/l/state.json && exit 0; "
            "mount -o remount,rw,lowerdir=/var/lib/remuda / && test -e /var/lib/remuda/state.json",
        ),
        (
            "cgroup of the machine",
            "`release_agent` of cgroup v1, and processes moved above the sandbox's own root",
            ":",
            "mkdir -p /mnt/c; mount -t cgroup -o memory c /mnt/c && "
            + _SET.format("/mnt/c/release_agent")
            + " && exit 0; mkdir -p /mnt/d; mount -t cgroup2 d /mnt/d && test -e /mnt/d/remuda && "
            "echo $$ >/mnt/d/cgroup.procs",
        ),
        (
            "folder of the job hook",
            "another file in the folder that the agent reads, or none",
            ":",
            "touch /run/remuda/other || mkdir /run/remuda/other || rm -f /run/remuda/.remuda-refused",
        ),
        (
            "limits of the sandbox",
            "deeper cgroups than the agent could remove",
            ":",
            python(
                "import os\nos.chdir('/sys/fs/cgroup')\nfor _ in range(1500):\n    os.mkdir('c')\n    os.chdir('c')"
            ),
        ),
        (
            "user namespace",
            "a new user namespace with mounts, to gain rights over files of the machine",
            "unshare -Urm true",
            "unshare -Urm sh -c 'mount -t overlay o -o lowerdir=/,upperdir=/tmp,workdir=/tmp /mnt; "
            "cat /mnt/var/lib/remuda/state.json'",
        ),
        (
            "immutable file",
            "`chattr +i`, which would keep the agent from deleting it",
            ":",
            f"touch {HOME}/fixed && chattr +i {HOME}/fixed",
        ),
        ("kernel log", "reading it", ":", "dmesg | grep -q ."),
        (
            "BPF program and performance events",
            "`bpf` and `perf_event_open` for the whole machine",
            ":",
            python(
                _SYSTEM_CALL.format(numbers={"x86_64": (298, 321), "aarch64": (241, 280)})
                + "event = bytes([0] * 4 + [112] + [0] * 107)\n"
                "program = bytes([18] + [0] * 127)\n"
                "sys.exit(not (libc.syscall(numbers[0], event, -1, 0, -1, 0) >= 0"
                " or libc.syscall(numbers[1], 5, program, 128) >= 0))"
            ),
        ),
        (
            "connection table",
            "20,000 connections at once, which the machine's kernel tracks because it translates addresses",
            python(f"{_PINGS}sys.exit(pings(1) < 1)"),
            python(f"{_PINGS}sys.exit(pings(20_000) < 16_384)"),
        ),
        ("metadata service as root", "by IPv4 and IPv6", ":", "reach 169.254.169.254 80 || reach fd00:ec2::254 80"),
        (
            "metadata service with another source",
            "address and route of root's choice",
            ":",
            "ip address add 169.254.169.2/24 dev host0; reach 169.254.169.254 80; code=$?; "
            "ip address del 169.254.169.2/24 dev host0; exit $code",
        ),
        (
            "metadata service from a container",
            "of docker, on the sandbox's network and on its own",
            _DOCKER,
            "docker run --rm implant timeout 1 bash -c 'exec 3<>/dev/tcp/169.254.169.254/80' || "
            "docker run --rm --net=host implant timeout 1 bash -c 'exec 3<>/dev/tcp/169.254.169.254/80'",
        ),
        (
            "ports of the machine",
            "the machine's address on the sandbox's network",
            ":",
            "reach $(ip route | sed -n 's/default via \\([^ ]*\\).*/\\1/p') 8099",
        ),
        (
            "privileged container, root of the machine",
            "reading the agent's state with `--privileged --pid=host -v /:/host`",
            _DOCKER,
            "docker run --rm --privileged --pid=host -v /:/host implant bash -c "
            "'cat /host/var/lib/remuda/state.json /host/root/secret /proc/*/root/var/lib/remuda/state.json' | grep .",
        ),
    )
)
#: As job user: without sudo.
ESCAPES += (
    Attack(
        name="metadata service as job user",
        what="by IPv4 and IPv6",
        plant="reach 169.254.169.254 80 || reach fd00:ec2::254 80",
        as_job_user=True,
    ),
)
PERSISTENT = (
    *IN_HOME,
    *IN_THE_RUNNER,
    *IN_SHARED_FOLDERS,
    *IN_THE_SYSTEM,
    *IN_THE_KERNEL,
    *SCHEDULED,
    *PROCESSES,
    *CONTAINERS,
)
GROUPS: Mapping[str, tuple[Attack, ...]] = {
    "In the home folder": IN_HOME,
    "In the folders of the runner": IN_THE_RUNNER,
    "In shared folders and on the disk": IN_SHARED_FOLDERS,
    "In the system": IN_THE_SYSTEM,
    "In the kernel": IN_THE_KERNEL,
    "Scheduled for later": SCHEDULED,
    "Processes": PROCESSES,
    "Container engines": CONTAINERS,
    "Escapes": ESCAPES,
}

PRELUDE = f"""
set +e
PYTHON={INTERPRETER}
export TMPDIR=/tmp/attacks-$(id -u)
mkdir -p $TMPDIR
py() {{ "$PYTHON" -IS - >/dev/null 2>&1; }}
runs() {{ pgrep -f -- "$1" >/dev/null; }}
reach() {{ timeout 1 bash -c 'exec 3<>/dev/tcp/$1/$2' - "$1" "$2"; }}
"""
#: Builds an image with a shell from files of the sandbox.
IMAGE = """
if docker info >/dev/null 2>&1; then (
  cd / && files="bin/sh bin/bash bin/sleep bin/cat bin/timeout"
  libraries=$(ldd $files | grep -o '/[^ ]*' | grep -v : | sort -u)
  tar -ch $files $libraries 2>/dev/null | docker import - implant >/dev/null
) fi
"""
_LINE = re.compile(r"^attack (?P<name>.+)=(?P<code>\d+)$", re.MULTILINE)


def plant_step(attacks: Iterable[Attack]) -> str:
    """A job step that carries out all attacks that this computer supports."""
    attacks = tuple(attacks)

    def lines(*, as_job_user: bool) -> str:
        # Escapes go on after a failure: they try several ways.
        return "\n".join(
            f"( {attack.needs}\n) >/dev/null 2>&1 </dev/null && {{ "
            f"( set {'-' if attack.look else '+'}e\n{attack.plant}\n) >/dev/null 2>&1 </dev/null; "
            f'echo "attack {attack.name}=$?"; }}'
            for attack in attacks
            if attack.as_job_user == as_job_user
        )

    return _step(lines(as_job_user=True), f"{IMAGE}{lines(as_job_user=False)}")


def look_step(attacks: Iterable[Attack]) -> str:
    """A job step that checks which attacks are still there."""
    attacks = tuple(attacks)

    def lines(*, as_job_user: bool) -> str:
        return "\n".join(
            f'( {attack.look}\n) >/dev/null 2>&1 </dev/null; echo "attack {attack.name}=$?"'
            for attack in attacks
            if attack.as_job_user == as_job_user
        )

    return _step(lines(as_job_user=True), lines(as_job_user=False))


def _step(as_job_user: str, as_root: str) -> str:
    return (
        f"cat >/tmp/as-root.sh <<'END_OF_ATTACKS'\n{PRELUDE}\n{as_root}\nEND_OF_ATTACKS\n"
        f"{PRELUDE}\n{as_job_user}\nsudo --preserve-env=GITHUB_API_URL bash /tmp/as-root.sh\ntrue"
    )


def parse_exit_codes(log: str) -> dict[str, int]:
    """The exit code per attack, from the log of a job."""
    return {found["name"]: int(found["code"]) for found in _LINE.finditer(log)}


def table(outcomes: Mapping[str, AttackOutcome]) -> str:
    """The table of the docs."""
    lines = []
    for group, attacks in GROUPS.items():
        lines += [f"### {group}", "", "| attack | what it does | outcome |", "|---|---|---|"]
        lines += [f"| {attack.name} | {attack.what} | {outcomes[attack.name]} |" for attack in attacks]
        lines.append("")
    return "\n".join(lines).strip()
