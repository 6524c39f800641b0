"""Sandboxes on this computer's kernel, in namespaces: real mounts, systemd-nspawn, systemd and docker inside.

A boot takes seconds, so that each test checks several things.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from remuda.agent import connections, sandbox
from remuda.agent.job_hook import REFUSED
from remuda.agent.listener import KILLED
from remuda.domain.resources import Tier
from tests.support import blocked_readers
from tests.support.sandbox_driver import OPEN_FILES
from tests.support.sandbox_host import Driver, SandboxHost, driver, missing

pytestmark = pytest.mark.skipif(bool(missing()), reason=f"sandboxes in namespaces: {missing()}")

#: Services of a sandbox; which of them exist depends on the packages of this computer.
SERVICES = {"containerd", "cron", "crond", "atd", "dbus", "dbus-broker", "docker", "systemd-journald"}
#: Seconds for a reset, even on a busy computer.
RESET_LIMIT_S = 10.0
#: Seconds for looks at the jobs.
LOOK_LIMIT_S = 10.0
#: In limits of tests that wait for a reset to fail.
SHORT_S = 1.0
MIB = 1024**2
#: Numbers of the system calls add_key and perf_event_open.
ADD_KEY, PERF_EVENT_OPEN = {"x86_64": (248, 298), "aarch64": (217, 241)}.get(os.uname().machine, (-1, -1))
#: Prints what limits a process, beside its user.
RESTRICTIONS = "grep -E '^(CapBnd|NoNewPrivs|Seccomp.*):' /proc/{}/status | tr -d '\\t' | tr '\\n' ' '; echo"
#: Processes of a sandbox must not reach the root of a process that enters it while that is still the host's.
REACH_HOST = r"""
open(LOAD, "<", "/proc/loadavg");
until (-e "/tmp/stop") {
    seek(LOAD, 0, 0);
    $last = (split " ", <LOAD>)[4];
    for (1 .. 300) {
        for $pid ($last + 1 .. $last + 3) {
            open(FOUND, ">", "/tmp/found") if -e "/proc/$pid/root/sys/fs/cgroup/remuda";
        }
    }
}
"""
#: Starts of a listener, of which without protection at least every tenth is hit.
STARTS = 40


@pytest.fixture(scope="module", params=["kernel-of-this-computer-in-namespaces"])
def host(request: pytest.FixtureRequest) -> Iterator[SandboxHost]:
    with SandboxHost("conformance") as made:
        yield made


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    # Deep and large trees take too long with Python's function.
    subprocess.run(["rm", "-rf", tmp_path], check=True)


@pytest.fixture
def agent(host: SandboxHost, folder: Path) -> Iterator[Driver]:
    with driver(host, folder=str(folder)) as made:
        yield made
        end(made)


def end(agent: Driver) -> None:
    """Discard what a test has left, and check that nothing remains."""
    agent("open", prepare=False)
    assert agent("discard") == ""
    assert agent("left") == {}


def lines(result: dict[str, str]) -> list[str]:
    return result["output"].split()


def test_every_assignment_gets_a_fresh_root(agent: Driver, host: SandboxHost) -> None:
    agent("open")
    first = agent(
        "run",
        name="r1",
        script="""
            exec 2>&1
            set -e
            [ "$(id -un)" = runner ] && [ "$PWD" = /opt/remuda/runner ]
            sudo touch /etc/from-run-1 /usr/bin/from-run-1 /root/from-run-1 /run/from-run-1
            touch /tmp/from-run-1 /var/tmp/from-run-1 ~/from-run-1 /opt/remuda/runner/from-run-1
            sudo sh -c 'echo 127.0.0.1 from-run-1 >>/etc/hosts; useradd from-run-1; chown 0 /home/runner/from-run-1'
            sudo unshare --mount sh -c 'mount -t tmpfs none /mnt; sleep 1000' >/dev/null &
            unshare --user --map-root-user --mount --fork sh -c 'mount -t tmpfs none /mnt; sleep 1000' >/dev/null &
            sudo mount -t tmpfs none /srv
            sudo mount --bind /etc /media
            if docker info >/dev/null; then
                tar -ch /bin/sleep $(ldd /bin/sleep | grep -o '/[^ ]*') 2>/dev/null | docker import - sleeper
                docker run --detach --privileged --volume /:/host sleeper /bin/sleep 1000
            fi
            sudo systemd-run --unit=from-run-1 sleep 1000
            echo done
        """,
    )
    assert (first["exit_code"], lines(first)[-1:]) == (0, ["done"]), first["output"]
    # The host may mount what it likes at any time: a snap, or the folder of an administrator who logs in.
    host.run("sh", "-ec", "for i in snap user; do mkdir -p /run/$i/1; mount -t tmpfs $i /run/$i/1; done")
    result = agent("reset")
    assert result["ok"], result
    assert result["seconds"] < RESET_LIMIT_S
    host.run("umount", "/run/snap/1", "/run/user/1")
    second = agent(
        "run",
        name="r2",
        script="""
            exec 2>/dev/null
            sudo find /etc /usr/bin /root /tmp /var /home /opt /run -name 'from-run-1*'
            grep from-run-1 /etc/hosts /etc/passwd; ls -A /srv/* /media/*; docker ps -aq; docker images -q; pgrep sleep
            exit 7
        """,
    )
    assert (second["output"], second["exit_code"]) == ("", 7)
    assert second["first_id"] >= first["first_id"] + 65_536
    assert agent("reset")["ok"]


def test_a_sandbox_runs_few_services_and_serves_one_runner_name(agent: Driver) -> None:
    agent("open")
    listing = """
        systemctl list-units --type=service --state=running --plain --no-legend | cut -d ' ' -f 1
        systemctl is-system-running; systemctl list-units --failed --plain --no-legend
        ls /home; cat /proc/1/comm; hostname; touch /tmp/mine
    """
    first = agent("run", name="r1", script=listing)
    *services, state, homes, init, host_name = lines(first)
    assert {name.removesuffix(".service") for name in services} <= SERVICES
    assert {"dbus.service", "systemd-journald.service"} <= set(services)
    assert (state, homes, init, host_name) == ("running", "runner", "systemd", "runner")
    again = agent("run", name="r1", script="cd /tmp; ls mine; ulimit -Sn; ulimit -Hn")
    assert lines(again) == ["mine", *map(str, OPEN_FILES)], "the limits of the agent"
    assert again["number"] == first["number"]
    # A program that is stopped and continued is not lost, and its keys are not those of the next one.
    values = '($type, $name, $value) = ("user", "remuda", "x")'
    add_key = f"perl -e '{values}; exit(syscall({ADD_KEY}, $type, $name, $value, 1, -3) < 0)'"
    stopped = agent(
        "run", name="r1", script=f"(sleep 0.3; kill -CONT $$) & {add_key} || exit 11; kill -STOP $$; exit 5"
    )
    assert stopped["exit_code"] == 5
    other = agent("run", name="r2", script="grep remuda /proc/keys; ls /tmp")
    assert "mine" not in other["output"]
    assert "remuda" not in other["output"]
    assert other["number"] == first["number"] + 1


@pytest.mark.skipif(shutil.which("perl") is None, reason="needs perl")
@pytest.mark.parametrize("capabilities", ["all", "CAP_SYS_ADMIN"])
def test_jobs_have_the_restrictions_of_the_container(host: SandboxHost, folder: Path, capabilities: str) -> None:
    """systemd-nspawn never permits perf_event_open, see src/nspawn/nspawn-seccomp.c of systemd."""
    refused = f"perl -e 'syscall({PERF_EVENT_OPEN}, 0, 0, 0, 0, 0); print $! + 0, chr(10)'"
    script = f"""
        {RESTRICTIONS.format(1)}; {RESTRICTIONS.format("self")}; sudo {RESTRICTIONS.format("self")}
        {refused}; sudo {refused}
        echo end; sleep 1000
    """
    with driver(host, folder=str(folder), limits={"CAPABILITIES": capabilities}) as agent:
        agent("open")
        agent("start", name="r1", script=script)
        agent("wait_for", text="end\n")
        init, job, root, *errors, _ = agent("output").splitlines()
        assert (job, root) == (init, init)
        assert ("CapBnd:000001ffffffffff" in init) == (capabilities == "all")
        assert "NoNewPrivs:0 Seccomp:2" in init
        assert errors == [str(errno.EPERM)] * 2
        first, *others = agent("filters").values()
        assert first
        assert others
        assert all(other == first for other in others)
        end(agent)


@pytest.mark.skipif(shutil.which("perl") is None, reason="needs perl")
def test_root_cannot_reach_the_host_through_a_listener_that_starts(agent: Driver) -> None:
    agent("open")
    script = f"cat >/tmp/reach.pl <<'END'\n{REACH_HOST}END\nsudo setsid perl /tmp/reach.pl >/dev/null 2>&1 &\n"
    agent("run", name="r1", script=script)
    for _ in range(STARTS):
        assert agent("run", name="r1", script="exit 6")["exit_code"] == 6
    ended = agent("run", name="r1", script="pgrep -c perl; touch /tmp/stop; find /tmp -name found")
    assert ended["output"] == "1\n"


def test_a_new_agent_finds_the_running_job_and_its_exit_code(host: SandboxHost, folder: Path) -> None:
    options = {"folder": str(folder)}
    first = Driver(host, **options)
    first("open")
    started = first("start", name="r1", script="echo begun; until [ -e /tmp/go ]; do sleep 0.05; done; exit 5")
    first("wait_for", text="begun")
    first.die()
    second = Driver(host, **options)
    found = second("open")
    assert found["listening"]
    assert (found["number"], found["used_by"]) == (started["number"], "r1")
    second("inside", command="touch /tmp/go")
    assert second("wait")["exit_code"] == 5
    # A job that ends while there is no agent.
    second("start", name="r1", script="echo begun; sleep 0.3; exit 6")
    second("wait_for", text="begun")
    second.die()
    host.run("sleep", "0.5")
    with driver(host, **options) as third:
        assert third("open")["listening"] is False
        assert third("wait")["exit_code"] == 6
        assert third("reset")["ok"]
        end(third)


def test_listener_that_updates_itself_is_started_again(agent: Driver) -> None:
    # What actions/runner does: src/Misc/layoutbin/update.sh.template.
    update = """
        while [ -e /proc/$$ ]; do sleep 0.1; done
        sleep 1
        mv -f bin bin.1 && cp -r bin.1 bin.2 && ln -s bin.2 bin && touch update.finished
    """
    agent("open")
    result = agent(
        "run",
        name="r1",
        script=f"""
            exec 2>&1
            echo "$(readlink bin || echo old) $(ls update.finished 2>/dev/null)"
            [ ! -L bin ] || exit 9
            ({update}) &
            exit 4
        """,
    )
    assert (lines(result), result["exit_code"]) == (["old", "bin.2"], 9), result["output"]


@pytest.mark.parametrize("command", ["poweroff", "reboot"])
def test_a_job_may_end_its_sandbox(agent: Driver, command: str) -> None:
    agent("open")
    # The shutdown waits for a process that ignores its signal, long after the end of the listener.
    ignore = "sudo sh -c \"trap '' TERM; setsid sleep 1000 &\""
    ended = agent("run", name="r1", script=f"{ignore}; sudo systemctl {command}; sleep 100")
    assert ended["exit_code"] not in {None, 0}
    # The agent starts the listener again, in another sandbox.
    again = agent("run", name="r1", script="exit 8")
    assert (again["exit_code"], again["number"]) == (8, ended["number"] + 1)


def test_processes_that_do_not_want_to_end(agent: Driver) -> None:
    agent("open")
    agent(
        "start",
        name="r1",
        script="""
            trap '' TERM INT HUP QUIT
            cat >/tmp/again <<'END'
#!/bin/bash
trap '' TERM INT HUP QUIT
(exec setsid "$0") &
exec "$0"
END
            chmod +x /tmp/again
            for i in 1 2 3; do sudo setsid /tmp/again & done
            sudo sh -c 'mkdir /sys/fs/cgroup/hidden; sleep 1000 & echo $! >/sys/fs/cgroup/hidden/cgroup.procs
                echo 1 >/sys/fs/cgroup/hidden/cgroup.freeze'
            bomb() { bomb | bomb & }
            echo begun
            bomb
            while :; do sleep 1; done
        """,
    )
    agent("wait_for", text="begun")
    agent("pause", seconds=1)
    result = agent("reset")
    assert result["ok"], result
    assert result["seconds"] < RESET_LIMIT_S
    assert agent("run", name="r2", script="pgrep again; exit 6")["exit_code"] == 6


def test_a_full_disk_ends_the_job_and_not_the_machine(host: SandboxHost, folder: Path) -> None:
    image, storage = folder / "disk", folder / "storage"
    storage.mkdir()
    with image.open("wb") as file:
        file.truncate(512 * MIB)
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    host.run("mount", "-o", "loop", image, storage)
    reserve = 128 * MIB
    try:
        with driver(host, folder=str(folder), limits={"DISK_RESERVE": reserve}) as agent:
            agent("open")
            full = agent("run", name="r1", script="head -c 1G /dev/zero >/tmp/large; echo not killed; sleep 100")
            assert (full["exit_code"], full["alive"]) == (KILLED, False)
            assert [name for name, _ in full["events"]] == ["sandbox-ready", "disk-full"]
            # The next job is not killed for the files of the last one, although their deletion takes time.
            again = agent("run", name="r1", script="sleep 0.2; exit 6")
            assert again["exit_code"] == 6
            assert [name for name, _ in again["events"]].count("disk-full") == 1
            agent("reset")
            end(agent)
    finally:
        host.run("umount", "--recursive", "--lazy", storage)


def test_the_next_run_works_after_one_that_took_all_files(host: SandboxHost, folder: Path) -> None:
    image, storage = folder / "disk", folder / "storage"
    storage.mkdir()
    with image.open("wb") as file:
        file.truncate(512 * MIB)
    subprocess.run(["mkfs.ext4", "-q", "-N", "30000", image], check=True)
    host.run("mount", "-o", "loop", image, storage)
    try:
        with driver(host, folder=str(folder), limits={"DISK_RESERVE": 64 * MIB, "FILE_RESERVE": 4_000}) as agent:
            agent("open")
            take = "mkdir ~/many; cd ~/many; seq 50000 | xargs touch 2>/dev/null; sleep 0.2"
            agent("run", name="r1", script=take)
            assert agent("reset")["ok"]
            again = agent("run", name="r2", script="mkdir ~/few && cd ~/few && seq 3000 | xargs touch && exit 6")
            assert again["exit_code"] == 6, again
            assert "sandbox-failed" not in [name for name, _ in again["events"]]
            agent("reset")
            end(agent)
    finally:
        host.run("umount", "--recursive", "--lazy", storage)


@pytest.mark.skipif(shutil.which("perl") is None, reason="needs perl")
def test_logs_are_limited(agent: Driver) -> None:
    agent("open")
    full = agent("run", name="r1", script="head -c 1G /dev/zero; sleep 100")
    assert (full["exit_code"], full["alive"]) == (KILLED, False)
    assert full["events"][-1][0] == "log-full"
    assert agent("log_bytes") <= sandbox.LOG_BYTES
    agent("run", name="r1", script="sudo sh -c 'head -c 1G /dev/zero >/dev/console'; exit 6")
    assert agent("log_bytes") <= sandbox.LOG_BYTES
    # Whoever has the log open can change its length.
    endless = agent("run", name="r1", script="perl -e 'truncate STDOUT, 1 << 42 or exit 1' && exit 6")
    assert endless["exit_code"] == 6
    assert agent("is_busy") is False
    agent("start", name="r1", script="echo 123456789; sleep 0.3; perl -e 'truncate STDOUT, 3 or exit 1' && sleep 1000")
    agent("wait_for", text="456")
    assert agent("is_busy") is False
    agent("wait_without", text="456")
    assert agent("waits_for_log")
    assert agent("reset")["ok"]


#: Files of a process that are read without the lock of its memory.
NEVER_BLOCK = {"stat", "status", "comm", "children", "task"}
#: MiB by which memory of the kernel may grow, and a job that takes more, as neighbours of its network.
KERNEL_LIMIT_MIB = 48
NEIGHBOURS = """
sudo sh -c 'ip link add n0 type veth peer name n1 && ip link set n0 up && echo begun && for i in $(seq 0 1200); do
    for j in $(seq 0 255); do echo neigh replace 10.$((i / 256)).$((i % 256)).$j $FIXED; done | ip -batch -
done'
""".replace("$FIXED", "lladdr 02:00:00:00:00:01 nud permanent dev n0")


def test_looks_at_jobs_open_nothing_that_jobs_can_block(agent: Driver, folder: Path) -> None:
    agent("open")
    agent("start", name="r1", script="sleep 100 & sudo sleep 100 & echo begun; wait")
    agent("wait_for", text="begun")
    paths = agent("looks")
    of_processes = [path.split("/")[3:] for path in paths if re.match(r"/proc/[0-9]", path)]
    assert ["stat"] in of_processes
    assert {parts[-1] for parts in of_processes if not parts[-1].isdecimal()} <= NEVER_BLOCK
    storage = str(folder / "storage")
    in_storage = [path.removeprefix(f"{storage}/") for path in paths if path.startswith(storage)]
    assert f"log/outbox/{REFUSED}" in in_storage
    # The rest belongs to the host.
    assert {path.split("/")[0] for path in in_storage} == {"log"}


@pytest.mark.skipif(not Path("/usr/bin/python3").exists(), reason="needs /usr/bin/python3")
@pytest.mark.parametrize("program", ["MEMORY", "FOLDER", "ITSELF"])
def test_job_that_blocks_its_readers_does_not_block_the_agent(
    agent: Driver, host: SandboxHost, folder: Path, program: str
) -> None:
    # Everybody may use it where udev runs.
    host.run("sh", "-ec", f"mknod -m 666 {folder}/fuse c 10 229; mount --bind {folder}/fuse /dev/fuse")
    try:
        agent("open")
        code = getattr(blocked_readers, program)
        script = f"cat >/tmp/block.py <<'END'\n{code}END\nsudo /usr/bin/python3 -IS /tmp/block.py; sleep 100"
        agent("start", name="r1", script=script)
        agent("wait_for", text="blocked\n")
        started = time.monotonic()
        assert agent("looks", limit_s=LOOK_LIMIT_S)
        agent("stop")
        assert agent("reset")["ok"]
        assert time.monotonic() - started < 2 * RESET_LIMIT_S
        assert agent("run", name="r2", script="exit 6")["exit_code"] == 6
    finally:
        host.run("sh", "-c", f"umount /dev/fuse; {blocked_readers.ABORT}")


def test_memory_that_no_cgroup_counts_ends_the_job_and_not_the_machine(host: SandboxHost, folder: Path) -> None:
    share = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // (KERNEL_LIMIT_MIB * MIB)
    with driver(host, folder=str(folder), limits={"KERNEL_SHARE": share}) as agent:
        agent("open")
        low = agent("run", name="r1", script=f"{NEIGHBOURS}sleep 100")
        assert (low["exit_code"], low["alive"]) == (KILLED, False)
        assert [name for name, _ in low["events"]] == ["sandbox-ready", "memory-low"]
        again = agent("run", name="r1", script="exit 6")
        assert again["exit_code"] == 6
        assert agent("reset")["ok"]
        end(agent)


def test_guard_outlives_the_agent_and_is_replaced(host: SandboxHost, folder: Path) -> None:
    first = Driver(host, folder=str(folder))
    first("open")
    first("start", name="r1", script="echo begun; until [ -e /tmp/go ]; do sleep 0.05; done; exit 5")
    first("wait_for", text="begun")
    old = first("guard_pid")
    host.run("sh", "-ec", f"kill -KILL {old}")
    first("pause", seconds=1)
    guard = first("guard_pid")
    assert guard != old
    first.die()
    # It keeps guarding the job, until the next agent has its own.
    host.run("sh", "-ec", f"sleep 0.5; test -e /proc/{guard}")
    with driver(host, folder=str(folder)) as second:
        second("open")
        assert second("guard_pid") != guard
        host.run("sh", "-ec", f"! test -e /proc/{guard}")
        second("inside", command="touch /tmp/go")
        assert second("wait")["exit_code"] == 5
        end(second)
        last = second("guard_pid")
    # With neither an agent nor a sandbox it ends.
    host.run("sh", "-ec", f"for i in $(seq 100); do test -e /proc/{last} || exit 0; sleep 0.1; done; exit 1")


def test_a_reset_reports_what_the_kernel_still_has(host: SandboxHost, folder: Path) -> None:
    with driver(host, folder=str(folder), limits={"END_LIMIT_S": SHORT_S}) as agent:
        agent("open")
        ran = agent("run", name="r1", script="exit 0")
        foreign = host.start(
            ("setpriv", f"--reuid={ran['first_id'] + 5}", "--clear-groups", "sleep", "100"), stdin=subprocess.DEVNULL
        )
        agent("pause", seconds=0.2)
        failed = agent("reset")
        assert not failed["ok"]
        assert "has a user id of the sandbox" in failed["detail"]
        host.run("pkill", "-x", "sleep")
        foreign.wait()
        root = folder / "storage" / str(ran["number"]) / "root"
        assert agent("reset")["ok"]
        ran = agent("run", name="r2", script="exit 0")
        root = folder / "storage" / str(ran["number"]) / "root"
        holder = host.start(("sh", "-c", f"cd {root} && exec sleep 100"), stdin=subprocess.DEVNULL)
        agent("pause", seconds=0.2)
        failed = agent("reset")
        assert not failed["ok"]
        assert "busy" in failed["detail"]
        host.run("pkill", "-x", "sleep")
        holder.wait()
        assert agent("reset")["ok"]
        end(agent)


@pytest.mark.skipif(shutil.which("iptables") is None, reason="needs iptables")
def test_connections_of_sandboxes_are_deleted(agent: Driver, host: SandboxHost) -> None:
    def tracked() -> int:
        return int(host.run("cat", "/proc/sys/net/netfilter/nf_conntrack_count"))

    # As the firewall script does for packets of sandboxes; port 9 stands for them.
    mark = f"iptables -t mangle -A OUTPUT -p udp --dport 9 -j CONNMARK --set-mark {connections.MARK}"
    host.run("sh", "-c", mark)
    send = "import socket\nfor port in (9, 10): socket.socket(2, 2).sendto(b'x', ('127.0.0.1', port))"
    agent("open", prepare=False)
    before = tracked()
    host.run(sys.executable, "-ISc", send)
    assert tracked() == before + 2
    assert agent("discard") == ""
    assert tracked() == before + 1, "that of the machine is left"
    host.run("iptables", "-t", "mangle", "-F", "OUTPUT")


def test_cache_volumes(host: SandboxHost, folder: Path) -> None:
    paths = ["/home/runner/.cache/pip", "/var/lib/things"]
    show = "cat ~/.cache/pip/f /var/lib/things/f 2>/dev/null; stat -c '%U %a' ~/.cache ~/.cache/pip /var/lib/things"
    with driver(host, folder=str(folder), cache_paths=paths) as agent:
        agent("open")
        write = "echo one >~/.cache/pip/f; sudo sh -c 'echo two >/var/lib/things/f; chmod 600 /var/lib/things/f'"
        assert agent("run", name="r1", script=f"{show}; {write}")["output"] == "runner 755\nrunner 755\nroot 755\n"
        assert agent("reset")["ok"]
        same = agent("run", name="r2", script=f"sudo {show.replace('~', '/home/runner')}", repository="O/R")
        assert lines(same)[:2] == ["one", "two"]
        assert not any(name == "cache-failed" for name, _ in same["events"])
        assert agent("reset")["ok"]
        for number, (repository, tier) in enumerate((("o/r", Tier.TRUSTED), ("o/r2", Tier.UNTRUSTED), ("", "trusted"))):
            other = agent("run", name=f"r3-{number}", script=show, repository=repository, tier=tier)
            assert "one" not in other["output"]
        # A set that is not strict may get a job of a fork on an instance for trusted ones.
        written = agent("run", name="r3-set", script=write, tier=Tier.TRUSTED, any_run=True, only_trusted=True)
        assert written["exit_code"] == 0
        fork = agent("run", name="r3-fork", script=show, tier=Tier.TRUSTED, any_run=True)
        assert "one" not in fork["output"]
        caches = sorted(path.name.rpartition("-")[0] for path in (folder / "caches").glob("[!.]*"))
        assert caches == ["o-r-trusted", "o-r-untrusted", "o-r2-untrusted"]
        # Files have the owners that jobs saw.
        (first,) = (folder / "caches").glob("o-r-untrusted-*")
        assert (first / "home%runner%.cache%pip" / "f").stat().st_uid == 1001
        assert (first / "var%lib%things" / "f").stat().st_uid == 0
        # An agent that dies while it mounts volumes must not leave them to a run of another repository.
        agent("open")
        assert agent("reset")["ok"]
        agent("ready")
        assert agent("crash", point="cache", request="run", name="r4", script="true")
        agent("open")
        last = agent("run", name="r5", script=show, repository="")
        assert "one" not in last["output"]
        end(agent)


#: Where an agent is killed while it prepares a sandbox, and whether the container has booted by then.
PREPARATION = (
    *("number", "layer", "clone", "overlay", "clone 2", "overlay 2", "unmount", "unmount 2", "before container"),
    *("container", "connect", "before save", "save"),
)
#: While it starts a listener, and while it discards a sandbox. Each crash of the second kind continues the last one.
START = ("save", "archive", "forget", "popen")
END = ("before kill", "kill", "before cgroup", "cgroup", "unmount", "unmount", "left", "before deletion")


def test_crash_during_preparation(agent: Driver) -> None:
    for point in PREPARATION:
        assert agent("crash", point=point, request="ready"), point
        assert agent("open", prepare=False)["alive"] is (point == "save")
        if point != "save":
            assert agent("left") == {}, point
    assert agent("run", name="r1", script="exit 9")["exit_code"] == 9


def test_crash_during_start_and_end(agent: Driver) -> None:
    agent("open")
    agent("ready")
    for point in START:
        assert agent("crash", point=point, request="start", name="r1", script="sleep 1000"), point
    found = agent("open", prepare=False)
    assert (found["used_by"], found["alive"]) == ("r1", True)
    for point in END:
        assert agent("crash", point=point, request="reset"), point
    agent("open", prepare=False)
    assert agent("left") == {}
    assert agent("run", name="r2", script="exit 9")["exit_code"] == 9


def test_discard_without_a_container(agent: Driver, host: SandboxHost, folder: Path) -> None:
    """Folders, cgroups and mounts as a restart of the computer, or the end of systemd-nspawn 255, can leave them."""
    agent("open", prepare=False)
    export = "/run/systemd/nspawn/unix-export/remuda-7"
    host.run("sh", "-c", f"mkdir -p {export} && mount -t tmpfs none {export}")
    (folder / "storage" / "7" / "upper").mkdir(parents=True)
    agent("make_cgroup", name="remuda-8")
    agent("make_cgroup", name="remuda-8/payload")
    assert agent("discard") == ""
    assert agent("left") == {}


#: What a sandbox needs at least, beside systemd.
IMAGE_PROGRAMS = ("sh", "bash", "cat", "id", "ls", "tar", "setpriv", "rm", "systemctl", "systemd-tmpfiles", "mount")


def copy_image(image: Path) -> None:
    """Copy a small root file system with systemd from this computer."""
    for name in (
        "usr/bin",
        "usr/sbin",
        "usr/lib/systemd",
        "usr/lib64",
        "etc",
        "proc",
        "sys",
        "dev",
        "run",
        "tmp",
        "var",
    ):
        (image / name).mkdir(parents=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        (image / name).symlink_to(f"usr/{name}")
    programs = [Path(found).resolve() for name in IMAGE_PROGRAMS if (found := shutil.which(name))]
    programs += [path for path in Path("/usr/lib/systemd").iterdir() if path.is_file()]
    listing = subprocess.run(["ldd", *programs], capture_output=True, text=True, check=False).stdout
    libraries = {Path(word) for word in listing.split() if word.startswith("/") and not word.endswith(":")}
    libraries |= set(Path("/usr/lib/systemd").glob("*.so"))
    for path in {*programs, *libraries}:
        target = image / str(path.resolve() if path in programs else path).lstrip("/")
        if path in libraries and not str(path).startswith("/usr"):
            target = image / "usr" / str(path).lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target)
    if not (image / "usr/bin/sh").exists():
        (image / "usr/bin/sh").symlink_to("bash")
    shutil.copytree("/usr/lib/systemd/system", image / "usr/lib/systemd/system", symlinks=True)
    for name in ("passwd", "group", "nsswitch.conf"):
        shutil.copy2(f"/etc/{name}", image / "etc" / name)
    (image / "etc/os-release").write_text("ID=image-of-a-team\n")


@pytest.mark.skipif(not Path("/bin").is_symlink(), reason="needs a system whose /bin is a link to /usr/bin")
def test_job_image(host: SandboxHost, folder: Path) -> None:
    image = folder / "image"
    copy_image(image)
    with driver(host, folder=str(folder), root=str(image)) as agent:
        agent("open")
        ran = agent("run", name="r1", script="cat /etc/os-release; id -un; ls -d /usr/share /home/*; exit 6")
        assert (lines(ran)[:2], ran["exit_code"]) == (["ID=image-of-a-team", "runner"], 6), ran["output"]
        assert "/home/runner" in lines(ran)
        assert agent("reset")["ok"]
        end(agent)
