"""Attacks of a job on the next run on the same machine.

Each attack is a few lines of bash that run as the job user: `plant` in a job of the first run, `look` in a later job.
`look` succeeds if the implant is still there. If jobs lack the permission for an attack, `plant` fails.
"""

# Paths of the tested machine.
# ruff: noqa: S108

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

HOME = "/home/remuda-job"
RUNNER = "/var/lib/remuda-jobs/runner"
WORK = "/var/lib/remuda-jobs/work"
#: The file to which the steps write the exit code of each attack.
EXIT_CODES = f"{HOME}/exit-codes"
#: Paths of the test image that all users may write to, and a file of root in the last of them.
SPOOL = "/opt/shared/a/b/c/d/e/spool"
LOG = "/opt/shared/log"
LOOSE = "/opt/shared/loose"
KEPT = "kept"
#: Seconds until a process must run. Generous: only a broken attack reaches it.
LIMIT_S = 60


class AttackOutcome(StrEnum):
    REMOVED = "removed"
    RETIRED = "machine terminated"
    REFUSED = "refused by the kernel"
    SEEN = "SEEN BY THE NEXT RUN"
    NOT_TESTED = "not tested"


@dataclass(frozen=True, kw_only=True)
class Attack:
    name: str
    #: Description for the table in the docs.
    what: str
    plant: str = ""
    look: str = ""
    outcome: AttackOutcome = AttackOutcome.REMOVED
    #: A command that fails if this computer does not support the attack.
    needs: str = ":"
    #: If the attack is not tested: the reason, and the other evidence.
    why: str = ""


def file(name: str, what: str, *paths: str, content: str = "implant", mode: str = "644") -> Attack:
    every = " ".join(paths)
    plant = (
        f'for path in {every}; do mkdir -p "$(dirname "$path")"; '
        f"printf '%s\\n' '{content}' >\"$path\"; chmod {mode} \"$path\"; done"
    )
    return Attack(name=name, what=what, plant=plant, look=" || ".join(f"test -e {path}" for path in paths))


def process(name: str, what: str, plant: str, command: str) -> Attack:
    """A process without the runner's tracking id: the runner kills processes with it at the end of a job."""
    wait = f"SECONDS=0; until runs '^{command}'; do [ $SECONDS -lt {LIMIT_S} ]; done"
    return Attack(name=name, what=what, plant=f"export RUNNER_TRACKING_ID=\n{plant}\n{wait}", look=f"runs '^{command}'")


def python(code: str) -> str:
    return f"py <<'END'\n{code.strip()}\nEND"


def daemon(code: str) -> str:
    """Start a program in the background and wait until it prints "ready"."""
    return (
        "me=$TMPDIR/$BASHPID\n"
        f"cat >$me.py <<'END'\n{code.strip()}\nEND\n"
        "mkfifo $me.ready\n"
        'RUNNER_TRACKING_ID= setsid "$PYTHON" -IS $me.py >$me.ready 2>/dev/null </dev/null &\n'
        'read -r word <$me.ready && [ "$word" = ready ]'
    )


def listening(name: str, then: str) -> str:
    """Start a daemon with a listening socket. `name` is a Python expression."""
    return daemon(f"""
import os, signal, socket
server = socket.socket(socket.AF_UNIX)
server.bind({name})
server.listen()
os.write(1, b"ready\\n")
os.close(1)
{then}
""")


def abstract(name: str) -> str:
    """The address of an abstract socket. It contains the user, as all machines on this computer share the addresses."""
    return f"chr(0) + '{name}-%d' % os.getuid()"


def connects(name: str) -> str:
    return python(f"import os, socket\nsocket.socket(socket.AF_UNIX).connect({name})")


#: Functions for kernel keys, for which no command may be installed.
_KEYS = """
import ctypes, platform, sys
libc = ctypes.CDLL(None, use_errno=True)
add, keyctl = {"x86_64": (248, 250), "aarch64": (217, 219)}[platform.machine()]
def key(ring):
    assert libc.syscall(add, b"user", b"implant", b"x", 1, ring) > 0
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

IN_HOME = (
    file("shell start file", "`.bashrc` with `LD_PRELOAD`", "~/.bashrc", content="export LD_PRELOAD=/tmp/x.so"),
    file("login file", "`.profile`, `.bash_login`", "~/.profile", "~/.bash_login"),
    file(
        "session environment",
        "`.pam_environment`, `environment.d`: `BASH_ENV`",
        "~/.pam_environment",
        "~/.config/environment.d/x.conf",
    ),
    file("git configuration", "`.gitconfig`: `core.hooksPath`, `credential.helper`", "~/.gitconfig"),
    file("git hooks of the user", "`.config/git/hooks`", "~/.config/git/hooks/post-checkout"),
    file("git credentials", "`.git-credentials`", "~/.git-credentials"),
    file("npm configuration", "`.npmrc`: another registry", "~/.npmrc"),
    file("pip configuration", "`pip.conf`: another index", "~/.config/pip/pip.conf"),
    file("Maven settings", "`.m2/settings.xml`: a mirror", "~/.m2/settings.xml"),
    file("cargo configuration", "`.cargo/config.toml`: a wrapper of `rustc`", "~/.cargo/config.toml"),
    file("Python start file", "`usercustomize.py` in the user's packages", "~/.local/lib/python3/usercustomize.py"),
    file("authorised keys", "`.ssh/authorized_keys`", "~/.ssh/authorized_keys", mode="600"),
    file("ssh configuration", "`.ssh/config`: `ProxyCommand`", "~/.ssh/config", mode="600"),
    file("netrc", "`.netrc`", "~/.netrc", mode="600"),
    file("docker credentials", "`.docker/config.json`: a credential helper", "~/.docker/config.json"),
    file(
        "cloud credentials",
        "`.aws/credentials`, `.kube/config`, those of `gh`",
        "~/.aws/credentials",
        "~/.kube/config",
        "~/.config/gh/hosts.yml",
        mode="600",
    ),
    file("shim in the user's PATH", "`~/.local/bin/git`", "~/.local/bin/git", mode="755"),
    file(
        "systemd user unit", "a unit in `.config/systemd/user`", "~/.config/systemd/user/default.target.wants/x.service"
    ),
    Attack(
        name="modes of the home folder",
        what="writable for all users",
        plant="chmod 0777 ~",
        look='[ "$(stat -c %a ~)" != 700 ]',
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
        plant=f"echo '# implant' >>{RUNNER}/run.sh",
        look=f"grep -q implant {RUNNER}/run.sh",
    ),
    Attack(
        name="changed program",
        what="a line in `bin/Runner.Listener`",
        plant=f"echo '# implant' >>{RUNNER}/bin/Runner.Listener",
        look=f"grep -q implant {RUNNER}/bin/Runner.Listener",
    ),
    Attack(
        name="hard link to a program",
        what="a second name of `bin/Runner.Worker`, to change it later",
        plant=f"ln {RUNNER}/bin/Runner.Worker {RUNNER}/second && ln {RUNNER}/bin/Runner.Worker ~/second",
        look=f'[ "$(stat -c %h {RUNNER}/bin/Runner.Worker)" != 1 ]',
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
    file("world-writable folder", "of the image, seven levels deep", f"{SPOOL}/implant"),
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
    Attack(name="System V shared memory", what="a segment", plant="ipcmk -M 4096", look='ipcs -m | grep -q "$USER"'),
    Attack(name="System V semaphores", what="a set", plant="ipcmk -S 1", look='ipcs -s | grep -q "$USER"'),
    Attack(name="System V queue", what="a queue", plant="ipcmk -Q", look='ipcs -q | grep -q "$USER"'),
    Attack(
        name="POSIX message queue",
        what="`/implant`",
        plant=python(_QUEUE.format(flags="os.O_CREAT")),
        look=python(_QUEUE.format(flags="0")),
    ),
    Attack(
        name="kernel key",
        what="in the keyring of the user",
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
)
SCHEDULED = (
    file("crontab", "in the spool folder, which the test image makes writable", "/var/spool/cron/crontabs/remuda-job"),
    file("at job", "in the spool folder, which the test image makes writable", "/var/spool/cron/atjobs/a00001"),
    file(
        "lingering login",
        "`loginctl enable-linger`: its folder, which the test image makes writable",
        "/var/lib/systemd/linger/remuda-job",
    ),
    file(
        "mailbox",
        "a mail that triggers `.forward` or a filter; the test image makes the folder writable",
        "/var/mail/remuda-job",
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
#: Attacks for which jobs lack the permission. If one worked, no reset could be trusted.
REFUSED = tuple(
    Attack(name=name, what=what, plant=plant, outcome=AttackOutcome.REFUSED)
    for name, what, plant in (
        ("immutable bit", "`chattr +i` on an own file", "touch ~/fixed && chattr +i ~/fixed"),
        ("append-only bit", "`chattr +a` on an own file", "touch ~/fixed && chattr +a ~/fixed"),
        ("hard link to a file of root", "a link in `/var/tmp` to `/etc/passwd`", "ln /etc/passwd /var/tmp/passwd"),
        ("pristine runner", "changing `/opt/remuda/runner`", "echo implant >>/opt/remuda/runner/run.sh"),
        ("registrar", "reading `/opt/remuda/registrar`", "ls /opt/remuda/registrar"),
        ("state of the agent", "reading `/var/lib/remuda`", "ls /var/lib/remuda"),
        (
            "folder next to those of jobs",
            "a new folder in `/var/lib/remuda-jobs`",
            "mkdir /var/lib/remuda-jobs/implant",
        ),
        ("preloaded library", "`/etc/ld.so.preload`", "echo /tmp/x.so >/etc/ld.so.preload"),
        ("system crontab", "`/etc/cron.d`", "mkdir -p /etc/cron.d && echo implant >/etc/cron.d/implant"),
        ("system profile", "`/etc/profile.d`", "echo implant >/etc/profile.d/implant.sh"),
        ("system unit", "`/etc/systemd/system`", "echo implant >/etc/systemd/system/implant.service"),
        ("system program", "a shim in `/usr/local/bin`", "cp /bin/true /usr/local/bin/git"),
        ("process of the agent", "sending a signal", "kill -STOP $(pgrep -o -f 'remuda agent')"),
    )
)
#: Attacks that no reset can undo. `look` is the reason that the record of the terminated machine must contain.
RETIRED = (
    Attack(
        name="world-writable file of root",
        what=f"a line in `{LOG}` of the test image",
        plant=f"echo implant >>{LOG}",
        look=f"{LOG}, which it may write to, is not as it was",
        outcome=AttackOutcome.RETIRED,
    ),
    Attack(
        name="world-writable folder without sticky bit",
        what=f"a file of root replaced in `{LOOSE}` of the test image",
        plant=f"rm -f {LOOSE}/{KEPT} && echo implant >{LOOSE}/{KEPT}",
        look=f"{KEPT} in {LOOSE}, where it may rename all, is not what it was",
        outcome=AttackOutcome.RETIRED,
    ),
    Attack(
        name="attribute of a folder of root",
        what=f"an extended attribute of `{LOOSE}`",
        plant=python(f'import os\nos.setxattr("{LOOSE}", "user.implant", b"1")'),
        look=f"{LOOSE}, which it may write to, has other attributes than before",
        outcome=AttackOutcome.RETIRED,
    ),
    Attack(
        name="locked keyring",
        what="without permissions even for its owner: it cannot be emptied",
        plant=python(f"{_KEYS}key(-4)\nassert libc.syscall(keyctl, 5, -4, 0) == 0"),
        look="the kernel's keys of remuda-job cannot be removed",
        outcome=AttackOutcome.RETIRED,
    ),
)
NOT_TESTED = tuple(
    Attack(name=name, what=what, why=why, outcome=AttackOutcome.NOT_TESTED)
    for name, what, why in (
        (
            "docker containers, volumes, networks, images",
            "left by a job",
            (
                "the test computer has no docker daemon. A job user with access to one is as powerful as root: "
                "its machine is terminated after each run (`tests/unit/agent/test_privileges.py`)"
            ),
        ),
        (
            "service of the user's systemd",
            "started by `systemctl --user`, kept by a lingering login",
            (
                "systemd is not the first process of the test machine. Its files and the login are tested above; "
                "its processes belong to the user"
            ),
        ),
        (
            "hard links that the kernel permits",
            "`fs.protected_hardlinks = 0`",
            (
                "the setting belongs to the kernel of the test computer. The reset reads it and terminates such a "
                "machine after a run (`tests/unit/agent/test_leftovers.py`)"
            ),
        ),
        (
            "cron and at jobs that start",
            "during a reset",
            (
                "their daemons are not installed on the test computer. The job user may use neither; the reset removes "
                "their files before and after it kills the processes, and its last check terminates the machine if "
                "anything is left (`tests/unit/agent/test_reset.py`)"
            ),
        ),
        (
            "mount by a setuid helper",
            "FUSE over a folder of the job, which hides its content",
            (
                "`fusermount` is not installed on the test computer. Any mount that is newer than the first job "
                "terminates the machine (`tests/unit/agent/test_leftovers.py`)"
            ),
        ),
        (
            "race with the start of a listener",
            "a job ends its own listener, and replaces `.env` by folders and links while the next one starts",
            (
                "a race of microseconds, tried many times in `tests/unit/agent/test_job_hook.py`: root removes no "
                "folder there and follows no link; the start fails, and after five failures the machine is terminated"
            ),
        ),
        (
            "core dumps and journal of the user",
            "which systemd or apport lets that user read",
            (
                "neither is installed on the test computer; tested with files in "
                "`tests/unit/agent/test_leftovers.py`. Jobs run with core dumps disabled"
            ),
        ),
        (
            "subordinate ids",
            "processes and files of user ids from `/etc/subuid`",
            (
                "the user that the bootstrap creates has none; tested in `tests/unit/agent/test_leftovers.py` and "
                "`test_job_user.py`"
            ),
        ),
    )
)
REMOVABLE = (*IN_HOME, *IN_THE_RUNNER, *IN_SHARED_FOLDERS, *SCHEDULED, *PROCESSES)
GROUPS: Mapping[str, tuple[Attack, ...]] = {
    "In the home folder": IN_HOME,
    "In the folders of the runner": IN_THE_RUNNER,
    "In shared folders and in the kernel": IN_SHARED_FOLDERS,
    "Scheduled for later": SCHEDULED,
    "Processes": PROCESSES,
    "Attacks that terminate the machine": RETIRED,
    "Attacks without permission": REFUSED,
    "Not tested": NOT_TESTED,
}

PRELUDE = f"""
set +e
PYTHON=/opt/interpreter/bin/python3
py() {{ "$PYTHON" -IS - >/dev/null 2>&1; }}
runs() {{ pgrep -u "$USER" -f -- "$1" >/dev/null; }}
codes={EXIT_CODES}
"""


def plant_step(attacks: Iterable[Attack]) -> str:
    """A job step that plants all attacks that this computer supports."""
    return PRELUDE + "\n".join(
        f"( {attack.needs}\n) >/dev/null 2>&1 && {{ ( set -e\n{attack.plant}\n) >/dev/null 2>&1; "
        f'echo "{attack.name}=$?" >>$codes; }}'
        for attack in attacks
    )


def look_step(attacks: Iterable[Attack]) -> str:
    """A job step that checks which attacks are still there."""
    lines = (f'( {attack.look}\n) >/dev/null 2>&1; echo "{attack.name}=$?" >>$codes' for attack in attacks)
    return "\n".join([PRELUDE, "rm -f $codes", *lines])


def parse_exit_codes(text: str) -> dict[str, int]:
    """The exit code per attack, as a step wrote them."""
    pairs = (line.rpartition("=") for line in text.splitlines())
    return {name: int(code) for name, _, code in pairs}


def table(outcomes: Mapping[str, AttackOutcome]) -> str:
    """The table of the docs."""
    lines = []
    for group, attacks in GROUPS.items():
        lines += [f"### {group}", "", "| attack | what it plants | outcome |", "|---|---|---|"]
        for attack in attacks:
            outcome = f"{outcomes[attack.name]}: {attack.why}" if attack.why else outcomes[attack.name]
            lines.append(f"| {attack.name} | {attack.what} | {outcome} |")
        lines.append("")
    return "\n".join(lines).strip()
