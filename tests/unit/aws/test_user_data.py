"""User data: size, shell style, and the effects of the bootstrap, run with fake system commands such as systemctl."""

from __future__ import annotations

import base64
import configparser
import gzip
import hashlib
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from remuda.adapters.aws.ec2.options import Ec2LaunchOptions
from remuda.adapters.aws.ec2.template import RootDevice, digest, template_data
from remuda.adapters.aws.user_data import MAX_BYTES, MachineLayout, build_user_data, compress
from remuda.agent import connections
from remuda.domain.errors import UserError
from tests.support.fake_s3 import FakeS3, fake_s3
from tests.support.user_data import (
    LIMIT_S,
    NEEDED,
    RECORD_CALL,
    SANDBOX_COMMANDS,
    AptLocks,
    BootstrapBox,
    executable,
    fake_imds,
    user_data,
)

AGENT = "s3://remuda-pool-123456789012-eu-central-1/agent/remuda-agent-0.1.0-"
RUNNER = "https://github.com/actions/runner/releases/download/v2.336.0/actions-runner-linux-"


def everything() -> dict[str, str]:
    digest = "0" * 64
    return {
        "agent-url": f"x86_64={AGENT}x86_64.tar.gz,arm64={AGENT}arm64.tar.gz",
        "agent-sha256": f"x86_64={digest},arm64={digest}",
        "actions-runner-version": "2.336.0",
        "actions-runner-sha256": f"x64={digest},arm64={digest}",
        "actions-runner-url": f"x64={RUNNER}x64-2.336.0.tar.gz,arm64={RUNNER}arm64-2.336.0.tar.gz",
        "job-image-url": "s3://bucket/jobs.tar.gz",
        "job-image-sha256": digest,
        "cache-paths": "/var/lib/docker,/home/runner/.cache",
        "pre-runner-script": "echo 'it''s'\n" * 300,
    }


@pytest.mark.parametrize("launch", [{}, everything()])
def test_user_data_is_valid_bash_within_the_size_limit(launch: dict[str, str]) -> None:
    text = user_data(launch)
    assert len(compress(text)) < MAX_BYTES // 2, "scripts need the rest"
    subprocess.run(["bash", "-n"], input=text.encode(), check=True, timeout=LIMIT_S)


def test_template_does_not_depend_on_the_version_of_zlib() -> None:
    root = RootDevice(name="/dev/xvda", gib=8)
    first = template_data(Ec2LaunchOptions.parse(NEEDED), user_data(), "pool", root)
    other = {**first, "UserData": base64.b64encode(gzip.compress(user_data().encode(), 1)).decode()}
    assert other != first
    assert digest(other) == digest(first)  # type: ignore[arg-type]
    assert digest(template_data(Ec2LaunchOptions.parse(NEEDED), "echo", "pool", root)) != digest(first)


def shellcheck(text: str) -> str:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed (apt-get install shellcheck): the bootstrap is not linted")
    command = ["shellcheck", "--severity=style", "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    return done.stdout


def test_shellcheck_accepts_the_bootstrap() -> None:
    assert shellcheck(user_data(everything())) == ""


def test_dead_man_timer_is_set_before_anything_can_fail() -> None:
    text = user_data({**everything(), "pre-runner-script": ""})
    lines = [line.strip() for line in text.splitlines() if not line.startswith("#")]
    commands = [line for line in lines if line and "=" not in line.split()[0]]
    timer = (
        '[[ $purpose == image ]] || dead_man remuda-dead-man-boot "$boot_life_s" || '
        'shutdown -P "+$((boot_life_s / 60 + 1))"'
    )
    at_once, power_off = '"${at_once[@]}"', "systemctl poweroff --force"
    assert commands[:6] == [
        "set -u",
        "umask 077",
        "dead_man() { # UNIT SECONDS",
        f'systemd-run --quiet --unit="$1" --on-active="$2" --timer-property=AccuracySec=1s {at_once} {power_off}',
        "}",
        timer,
    ]


def test_too_long_pre_runner_script_is_rejected() -> None:
    noise = "".join(hashlib.sha256(str(number).encode()).hexdigest() for number in range(600))
    with pytest.raises(UserError) as caught:
        user_data({"pre-runner-script": noise})
    assert caught.value.field == "pre-runner-script"


@pytest.mark.parametrize("pair", [{"lower": "x"}, {"NAME": "two\nlines"}, {"NAME": 'quo"te'}])
def test_environment_that_needs_quoting_is_rejected(pair: dict[str, str]) -> None:
    with pytest.raises(UserError):
        build_user_data(Ec2LaunchOptions.parse(NEEDED), pool="pool", environment=pair)


# Execution of the bootstrap


@pytest.fixture
def box(tmp_path: Path) -> Iterator[BootstrapBox]:
    with fake_imds() as imds:
        yield BootstrapBox(tmp_path, imds)


def test_complete_image_downloads_nothing(box: BootstrapBox) -> None:
    box.preinstall()
    done = box.boot({"pre-runner-script": "echo 'hello'\n"})
    assert (done.returncode, done.stderr) == (0, "")
    calls = box.calls
    assert calls[0].startswith("systemd-run --quiet --unit=remuda-dead-man-boot --on-active=1800 ")
    assert calls[1].startswith("systemd-run --quiet --unit=remuda-dead-man-launch --on-active=400 ")
    assert calls[2] == "systemctl stop remuda-dead-man-boot.timer"
    assert (box.state / "dead-man").read_text().split() == ["remuda-dead-man-boot", "remuda-dead-man-launch"]
    assert calls[-3:] == [
        "systemctl daemon-reload",
        "systemctl enable remuda-firewall.service remuda-agent.service remuda-dead-man-reboot.timer",
        "systemctl start --no-block remuda-agent.service",
    ]
    assert not [call for call in calls if call.startswith("fetch")]
    assert (box.state / "pre-runner.sh").read_text() == "echo 'hello'\n"
    assert (box.state / "agent.env").read_text().splitlines() == [
        "AWS_REGION=eu-central-1",
        f"AWS_EC2_METADATA_SERVICE_ENDPOINT={box.environment['AWS_EC2_METADATA_SERVICE_ENDPOINT']}",
        "REMUDA_BACKEND=aws",
        "REMUDA_POOL=pool",
    ]
    for path in (box.state, box.state / "agent.env", box.state / "pre-runner.sh"):
        assert not stat.S_IMODE(path.stat().st_mode) & 0o077
    unit = (box.units / "remuda-agent.service").read_text()
    for line in ("Restart=always", "Slice=remuda.slice", "KillMode=process", f"ExecStart={box.opt}/bin/remuda agent"):
        assert line in unit.splitlines()
    assert f"ExecStartPre={box.opt}/bin/remuda-firewall" in unit.splitlines()
    assert "OnBootSec=1800" in (box.units / "remuda-dead-man-reboot.timer").read_text()


SANDBOXES = "ve-remuda-+"
FIRST = "-m conntrack --ctstate NEW ! --ctstatus CONFIRMED"
RATE = "-m hashlimit --hashlimit-name remuda --hashlimit-above 500/second --hashlimit-burst 10000"
RULES = {
    "iptables": [
        f"mangle -I FORWARD -i {SANDBOXES} -j CONNMARK --set-mark {connections.MARK:#x}",
        f"mangle -I FORWARD -i {SANDBOXES} {FIRST} -m connlimit --connlimit-above 16384 --connlimit-mask 0 -j DROP",
        f"mangle -I FORWARD -i {SANDBOXES} {FIRST} {RATE} -j DROP",
        "mangle -I FORWARD -d 169.254.169.254 -j DROP",
        f"filter -I INPUT -i {SANDBOXES} -j DROP",
        f"filter -I FORWARD -o {SANDBOXES} -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT",
        f"filter -I FORWARD -i {SANDBOXES} -j ACCEPT",
        "nat -I POSTROUTING -s 198.18.0.0/15 -j MASQUERADE",
    ],
    "ip6tables": [
        "mangle -I FORWARD -d fd00:ec2::254 -j DROP",
        f"filter -I INPUT -i {SANDBOXES} -j DROP",
        f"filter -I FORWARD -i {SANDBOXES} -j DROP",
    ],
}
#: A fake iptables that keeps its rules in a file.
IPTABLES = """#!/bin/sh
echo "$(basename "$0") $*" >>"$CALLS"
rules="$CALLS.$(basename "$0")"
case $4 in
  -C) shift 4; grep -qxF -- "$*" "$rules" ;;
  -I) shift 4; echo "$*" >>"$rules" ;;
esac
"""


def firewall(box: BootstrapBox) -> subprocess.CompletedProcess[str]:
    """Run the firewall script as its systemd unit does, in a network namespace: it enables forwarding."""
    command = ["unshare", "--net", *([] if os.geteuid() == 0 else ["--map-root-user"])]
    if subprocess.run([*command, "true"], capture_output=True, check=False, timeout=LIMIT_S).returncode:
        pytest.skip("this computer does not permit network namespaces: the firewall script is not run")
    command.append(str(box.opt / "bin" / "remuda-firewall"))
    return subprocess.run(command, env=box.environment, capture_output=True, text=True, check=False, timeout=LIMIT_S)


def test_shellcheck_accepts_the_firewall_script(box: BootstrapBox) -> None:
    box.preinstall()
    box.boot()
    assert shellcheck((box.opt / "bin" / "remuda-firewall").read_text()) == ""


def test_firewall_rules_are_set_once(box: BootstrapBox) -> None:
    box.preinstall()
    box.command("iptables", IPTABLES)
    box.command("ip6tables", IPTABLES)
    box.boot()
    assert not [call for call in box.calls if "tables" in call]
    for _ in range(2):
        assert firewall(box).returncode == 0
    families = ["iptables", *(["ip6tables"] if Path("/proc/net/if_inet6").exists() else [])]
    inserted = [call for call in box.calls if " -I " in call]
    assert inserted == [f"{name} -w -t {rule}" for name in families for rule in RULES[name]], "the second run adds none"


@pytest.mark.parametrize("broken", ["iptables", "ip6tables"])
def test_firewall_fails_if_a_rule_cannot_be_set(box: BootstrapBox, broken: str) -> None:
    """The agent then does not start."""
    if broken == "ip6tables" and not Path("/proc/net/if_inet6").exists():
        pytest.skip("this kernel has no IPv6, so no such rule is set")
    box.preinstall()
    box.command("iptables", IPTABLES)
    box.command("ip6tables", IPTABLES)
    box.command(broken, RECORD_CALL + "exit 1\n")
    box.boot()
    assert firewall(box).returncode != 0


def test_firewall_starts_before_the_network_and_the_agent(box: BootstrapBox) -> None:
    box.preinstall()
    box.boot()
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    text = (box.units / "remuda-firewall.service").read_text()
    before = {word for line in text.splitlines() if line.startswith("Before=") for word in line[7:].split()}
    unit.read_string(text)
    assert unit["Service"]["ExecStart"] == f"{box.opt}/bin/remuda-firewall"
    assert unit["Unit"]["DefaultDependencies"] == "no", "the default dependencies would start it too late"
    assert "network-pre.target" in before
    agent = (box.units / "remuda-agent.service").read_text().splitlines()
    assert f"ExecStartPre={box.opt}/bin/remuda-firewall" in agent
    assert "After=network-online.target remuda-firewall.service" in agent
    assert stat.S_IMODE((box.opt / "bin" / "remuda-firewall").stat().st_mode) == 0o700


def test_jobs_may_open_as_many_files_and_start_as_many_processes_as_on_github(box: BootstrapBox) -> None:
    box.preinstall()
    box.boot()
    unit = (box.units / "remuda-agent.service").read_text().splitlines()
    # They inherit these limits, see the tests of sandboxes.
    assert {"LimitNOFILE=65536:1048576", "LimitNPROC=infinity"} <= set(unit)


def test_systemd_restarts_an_agent_that_does_not_report(box: BootstrapBox) -> None:
    box.preinstall()
    box.boot()
    unit = (box.units / "remuda-agent.service").read_text().splitlines()
    # Not with SIGABRT: a process that waits in the kernel takes SIGKILL only.
    assert {"WatchdogSec=120", "WatchdogSignal=SIGKILL", "Restart=always", "KillMode=process"} <= set(unit)


def test_systemd_accepts_the_units(box: BootstrapBox) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed (apt-get install systemd): the units are not verified")
    box.preinstall()
    box.boot()
    units = sorted(str(path) for path in box.units.glob("remuda-*"))
    assert len(units) == 4
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *units], capture_output=True, text=True, check=False, timeout=LIMIT_S
    )
    messages = [line for line in done.stderr.splitlines() if "remuda" in line]
    assert (messages, done.returncode) == ([], 0), done.stderr


def test_agent_and_runner_are_downloaded_and_verified(box: BootstrapBox) -> None:
    agent = box.offer("agent.tar.gz", {"bin/remuda": "#!/bin/sh\n"})
    arch = {"x86_64": "x64", "aarch64": "arm64"}[os.uname().machine]
    runner = box.offer(f"actions-runner-linux-{arch}-2.336.0.tar.gz", {"bin/Runner.Listener": "#!/bin/sh\n"})
    launch = {
        "agent-url": "https://downloads.example.com/agent.tar.gz",
        "agent-sha256": agent,
        "actions-runner-version": "2.336.0",
        "actions-runner-sha256": runner,
    }
    done = box.boot(launch)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"fetch {RUNNER}{arch}-2.336.0.tar.gz" in box.calls
    listener = box.opt / "runner" / "bin" / "Runner.Listener"
    assert os.access(listener, os.X_OK)
    # Jobs must be able to read it.
    assert stat.S_IMODE(listener.stat().st_mode) & 0o055 == 0o055
    assert not stat.S_IMODE(listener.stat().st_mode) & 0o022


def listener(version: str) -> str:
    """A runner of this version, which writes a log as the real one does."""
    return f'#!/bin/sh\nmkdir -p "${{0%/*}}/../_diag"\n[ "$1" != --version ] || echo {version}\n'


def install(box: BootstrapBox, version: str) -> Path:
    """Install agent and runner as in the image, with a file that only this version has. Return its path."""
    box.preinstall()
    executable(box.opt / "runner" / "bin" / "Runner.Listener", listener(version))
    (box.opt / "runner" / "old").touch()
    return box.opt / "runner" / "old"


def release(box: BootstrapBox, version: str) -> dict[str, str]:
    """Offer a release and return the launch options that install it."""
    digests = {
        arch: box.offer(f"actions-runner-linux-{arch}-{version}.tar.gz", {"bin/Runner.Listener": listener(version)})
        for arch in ("x64", "arm64")
    }
    return {
        "actions-runner-version": version,
        "actions-runner-sha256": ",".join(f"{arch}={digest}" for arch, digest in digests.items()),
    }


def test_runner_of_another_version_in_the_image_is_replaced(box: BootstrapBox) -> None:
    old = install(box, "2.330.0")
    done = box.boot(release(box, "2.336.0"))
    assert (done.returncode, done.stderr) == (0, "")
    assert "runner 2.330.0, wanted 2.336.0" in done.stdout
    assert (box.opt / "runner" / "bin" / "Runner.Listener").read_text() == listener("2.336.0")
    assert not old.exists()


@pytest.mark.parametrize("wanted", ["2.336.0", "image", ""])
def test_runner_of_the_image_is_kept(box: BootstrapBox, wanted: str) -> None:
    old = install(box, "2.336.0" if wanted == "2.336.0" else "2.330.0")
    options = release(box, wanted) if wanted == "2.336.0" else {"actions-runner-version": wanted}
    done = box.boot(options)
    assert (done.returncode, done.stderr) == (0, "")
    assert old.exists()
    assert not [call for call in box.calls if call.startswith("fetch")]
    assert not (box.opt / "runner" / "_diag").exists(), "the check of the version leaves a log behind"


@pytest.mark.parametrize(("machine", "arch"), [("x86_64", "x64"), ("aarch64", "arm64")])
def test_package_for_the_architecture_of_the_machine_is_installed(box: BootstrapBox, machine: str, arch: str) -> None:
    box.preinstall()
    box.command("uname", f"#!/bin/sh\ncase $1 in -m) echo {machine} ;; *) echo 6.1.0 ;; esac\n")
    done = box.boot(release(box, "2.336.0"))
    assert (done.returncode, done.stderr) == (0, "")
    assert [call for call in box.calls if call.startswith("fetch")] == [f"fetch {RUNNER}{arch}-2.336.0.tar.gz"]


def test_missing_package_for_the_architecture_is_reported(box: BootstrapBox) -> None:
    box.preinstall()
    box.command("uname", "#!/bin/sh\ncase $1 in -m) echo aarch64 ;; *) echo 6.1.0 ;; esac\n")
    done = box.boot({"actions-runner-version": "2.336.0", "actions-runner-sha256": f"x64={'0' * 64}"})
    assert done.returncode == 1
    assert "actions-runner-sha256 has no value for arm64" in done.stdout


def test_image_without_a_runner_needs_a_version(box: BootstrapBox) -> None:
    executable(box.opt / "bin" / "remuda", "#!/bin/sh\n")
    done = box.boot({"actions-runner-version": "image"})
    assert done.returncode == 1
    assert "the image has no runner" in done.stdout


def test_unresolved_version_is_rejected() -> None:
    with pytest.raises(UserError, match="latest") as caught:
        user_data({"actions-runner-version": "latest"})
    assert caught.value.field == "actions-runner-version"


@pytest.mark.parametrize(("machine", "arch"), [("x86_64", "x86_64"), ("aarch64", "arm64")])
def test_agent_for_the_architecture_of_the_machine_is_installed(box: BootstrapBox, machine: str, arch: str) -> None:
    box.preinstall()
    (box.opt / "bin" / "remuda").unlink()
    box.command("uname", f"#!/bin/sh\ncase $1 in -m) echo {machine} ;; *) echo 6.1.0 ;; esac\n")
    digests = {
        name: box.offer(f"{name}.tar.gz", {"bin/remuda": f"#!/bin/sh\n# {name}\n"}) for name in ("x86_64", "arm64")
    }
    launch = {
        "agent-url": ",".join(f"{name}=https://downloads.example.com/{name}.tar.gz" for name in digests),
        "agent-sha256": ",".join(f"{name}={digest}" for name, digest in digests.items()),
    }
    done = box.boot(launch)
    assert (done.returncode, done.stderr) == (0, "")
    assert (box.opt / "bin" / "remuda").read_text() == f"#!/bin/sh\n# {arch}\n"


# Downloads from S3

CREDENTIALS = {"AccessKeyId": "ASIAEXAMPLE", "SecretAccessKey": "secret/of+the=role", "Token": "token/of+the=role=="}
KEY = "/remuda-pool-123456789012-eu-central-1/agent/remuda-agent-0.1.0-x86_64~1.tar.gz"


@pytest.fixture
def s3(box: BootstrapBox) -> Iterator[FakeS3]:
    box.preinstall()
    box.imds.set_credentials("agent", CREDENTIALS)
    # Like the real one: new tokens do not end older ones.
    box.imds.valid = 100
    with fake_s3("eu-central-1", {CREDENTIALS["AccessKeyId"]: CREDENTIALS}.get) as server:
        box.environment["AWS_ENDPOINT_URL_S3"] = server.url
        yield server


def s3_options(box: BootstrapBox, s3: FakeS3) -> dict[str, str]:
    digest = box.offer("agent.tar.gz", {"bin/remuda": "#!/bin/sh\n# from S3\n"})
    s3.objects[KEY] = (box.mirror / "agent.tar.gz").read_bytes()
    return {"agent-url": f"s3:/{KEY}", "agent-sha256": digest}


def test_agent_is_downloaded_from_s3_with_the_role_of_the_machine(box: BootstrapBox, s3: FakeS3) -> None:
    box.command("aws", "#!/bin/sh\nexit 1\n")
    box.command("python3", f'#!/bin/sh\necho "python3 $*" >>"$CALLS"\nexec {sys.executable} "$@"\n')
    done = box.boot(s3_options(box, s3))
    assert (done.returncode, done.stderr) == (0, "")
    assert (box.opt / "bin" / "remuda").read_text() == "#!/bin/sh\n# from S3\n"
    assert s3.requests == [KEY]
    seen = "\n".join([*box.calls, done.stdout])
    assert not [value for value in CREDENTIALS.values() if value in seen]


@pytest.mark.parametrize("status", [301, 400])
def test_bucket_may_be_in_another_region(box: BootstrapBox, s3: FakeS3, status: int) -> None:
    s3.region, s3.redirect = "us-east-1", status
    box.no_pauses()
    done = box.boot(s3_options(box, s3))
    assert (done.returncode, done.stderr, len(s3.requests)) == (0, "", 2), done.stdout


def test_failed_requests_to_s3_are_repeated(box: BootstrapBox, s3: FakeS3) -> None:
    s3.failures = 4
    box.no_pauses()
    done = box.boot(s3_options(box, s3))
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert done.stdout.count("503") == 4


@pytest.mark.parametrize("problem", ["missing", "denied", "no role", "other key"])
def test_reason_of_a_failed_download_from_s3_is_reported(box: BootstrapBox, s3: FakeS3, problem: str) -> None:
    options = s3_options(box, s3)
    box.no_pauses()
    expected = "404"
    if problem == "missing":
        s3.objects.clear()
        expected = "NoSuchKey The specified key does not exist."
    elif problem == "no role":
        box.imds.values.pop("iam/security-credentials/")
    elif problem == "other key":
        box.imds.set_credentials("agent", {**CREDENTIALS, "SecretAccessKey": "another"})
        expected = "SignatureDoesNotMatch"
    else:
        box.imds.set_credentials("agent", {**CREDENTIALS, "Token": "expired"})
        expected = "InvalidAccessKeyId"
    done = box.boot(options)
    assert done.returncode == 1
    assert expected in done.stdout
    assert f"the role of this machine needs s3:GetObject on s3:/{KEY}" in done.stdout


def agent_options(box: BootstrapBox, text: str, **more: str) -> dict[str, str]:
    """Offer an agent and return the launch options that install it."""
    digest = box.offer("agent.tar.gz", {"bin/remuda": text, **more})
    return {"agent-url": "https://downloads.example.com/agent.tar.gz", "agent-sha256": digest}


def test_agent_of_the_image_is_replaced_if_another_one_is_set(box: BootstrapBox) -> None:
    box.preinstall()
    first = agent_options(box, "#!/bin/sh\n# first\n", **{"lib/old.py": ""})
    assert box.boot(first).returncode == 0
    assert box.boot(first).returncode == 0
    assert box.calls.count(f"fetch {first['agent-url']}") == 1, "the second boot has it already"
    assert box.boot(agent_options(box, "#!/bin/sh\n# second\n")).returncode == 0
    assert (box.opt / "bin" / "remuda").read_text() == "#!/bin/sh\n# second\n"
    assert not (box.opt / "lib" / "old.py").exists()
    assert box.boot().returncode == 0
    assert box.calls.count(f"fetch {first['agent-url']}") == 2, "without the setting, the image's agent is kept"


@pytest.mark.parametrize("manager", ["apt-get", "dnf"])
def test_python_is_installed_if_the_agent_finds_none(box: BootstrapBox, manager: str) -> None:
    box.preinstall()
    box.command(manager, f'{RECORD_CALL}case "$*" in *"install"*python3.11) touch "$CALLS.python" ;; esac\n')
    done = box.boot(agent_options(box, '#!/bin/sh\n[ -e "$CALLS.python" ]\n'))
    assert (done.returncode, done.stderr) == (0, "")
    assert [call for call in box.calls if call.endswith(" python3.11")]


def test_an_agent_that_does_not_run_is_reported(box: BootstrapBox) -> None:
    box.preinstall()
    done = box.boot(agent_options(box, "#!/bin/sh\necho it needs another machine >&2\nexit 2\n"))
    assert done.returncode == 1
    assert "the agent does not run" in done.stdout
    assert done.stderr == "it needs another machine\n"
    assert not [call for call in box.calls if "start" in call]


def test_download_with_wrong_digest_is_not_run(box: BootstrapBox) -> None:
    box.offer("agent.tar.gz", {"bin/remuda": "#!/bin/sh\n"})
    launch = {"agent-url": "https://downloads.example.com/agent.tar.gz", "agent-sha256": "0" * 64}
    done = box.boot(launch)
    assert done.returncode == 1
    assert "does not have the expected SHA-256" in done.stdout
    assert not (box.opt / "bin" / "remuda").exists()
    # The dead-man timer still powers the machine off.
    assert box.calls[0].startswith("systemd-run --quiet --unit=remuda-dead-man-boot ")
    assert not [call for call in box.calls if "start" in call]


def test_shutdown_replaces_a_failing_systemd_run(box: BootstrapBox) -> None:
    box.preinstall()
    box.command("systemd-run", RECORD_CALL + "exit 1\n")
    box.boot()
    assert box.calls[1] == "shutdown -P +31"


def test_missing_agent_is_reported(box: BootstrapBox) -> None:
    done = box.boot()
    assert done.returncode == 1
    assert "agent-url" in done.stdout


# Sandboxes


def test_cache_settings_become_variables_of_the_agent(box: BootstrapBox) -> None:
    box.preinstall()
    done = box.boot({"cache-paths": "/var/lib/docker, /home/runner/.cache", "cache-size-gib": "40"})
    assert (done.returncode, done.stderr) == (0, "")
    lines = (box.state / "agent.env").read_text().splitlines()
    assert "REMUDA_CACHE_PATHS=/var/lib/docker:/home/runner/.cache" in lines
    assert "REMUDA_CACHE_GIB=40" in lines


def test_cache_size_without_paths_is_not_passed_on() -> None:
    assert "REMUDA_CACHE" not in user_data({"cache-size-gib": "40"})


def test_kernel_modules_become_a_variable_of_the_agent(box: BootstrapBox) -> None:
    box.preinstall()
    assert box.boot({"kernel-modules": "nfs, sch_netem"}).returncode == 0
    assert "REMUDA_KERNEL_MODULES=nfs,sch_netem" in (box.state / "agent.env").read_text().splitlines()
    assert "REMUDA_KERNEL_MODULES" not in user_data({})


JOB_IMAGE = "https://downloads.example.com/jobs.tar.gz"


@pytest.mark.parametrize("systemd", ["usr/lib/systemd/systemd", "./lib/systemd/systemd"])
def test_job_image_is_verified_and_unpacked_once(box: BootstrapBox, systemd: str) -> None:
    box.preinstall()
    digest = box.offer("jobs.tar.gz", {systemd: "", "./etc/os-release": "NAME=jobs\n"})
    launch = {"job-image-url": JOB_IMAGE, "job-image-sha256": digest}
    for _ in range(2):
        done = box.boot(launch)
        assert (done.returncode, done.stderr) == (0, "")
    assert box.calls.count(f"fetch {JOB_IMAGE}") == 1
    image = box.state / "job-image"
    assert (image / "etc" / "os-release").read_text() == "NAME=jobs\n"
    assert stat.S_IMODE(image.stat().st_mode) == 0o755, "every user of a sandbox must be able to enter its root"


def test_job_image_with_wrong_digest_is_not_unpacked(box: BootstrapBox) -> None:
    box.preinstall()
    box.offer("jobs.tar.gz", {"usr/lib/systemd/systemd": ""})
    done = box.boot({"job-image-url": JOB_IMAGE, "job-image-sha256": "0" * 64})
    assert done.returncode == 1
    assert f"{JOB_IMAGE} does not have the expected SHA-256" in done.stdout
    assert not list(box.state.glob("job-image*"))


def test_job_image_without_systemd_is_rejected(box: BootstrapBox) -> None:
    box.preinstall()
    digest = box.offer("jobs.tar.gz", {"etc/os-release": ""})
    done = box.boot({"job-image-url": JOB_IMAGE, "job-image-sha256": digest})
    assert done.returncode == 1
    assert f"{JOB_IMAGE} has no systemd" in done.stdout
    assert not (box.state / "job-image").exists()


@pytest.mark.parametrize(
    ("manager", "installs"),
    [
        ("apt-get", ["systemd-container", "iptables", "iproute2", "sudo", "docker.io"]),
        ("dnf", ["systemd-container", "iptables-nft", "iproute", "sudo", "docker"]),
    ],
)
def test_missing_packages_are_installed(box: BootstrapBox, manager: str, installs: list[str]) -> None:
    box.preinstall()
    box.without(*SANDBOX_COMMANDS, "apt-get", "dnf")
    paths = " ".join(str(box.bin / name) for name in SANDBOX_COMMANDS)
    box.command(manager, f"{RECORD_CALL}case $* in *install*) for path in {paths}; do cp -p $0 $path; done ;; esac\n")
    done = box.boot()
    assert (done.returncode, done.stderr) == (0, "")
    (install,) = [call for call in box.calls if call.startswith(f"{manager} ") and " install " in call]
    assert install.split()[-len(installs) :] == installs


@pytest.mark.parametrize("manager", ["apt-get", "dnf"])
@pytest.mark.parametrize("failures", [3, 6])
def test_locked_package_manager_is_tried_again(box: BootstrapBox, manager: str, failures: int) -> None:
    box.preinstall()
    box.without(*SANDBOX_COMMANDS, "apt-get", "dnf")
    paths = " ".join(str(box.bin / name) for name in SANDBOX_COMMANDS)
    lock = f'[ "$(grep -c "{manager}.* install " "$CALLS")" -gt {failures} ] || exit 100\n'
    install = f"for path in {paths}; do cp -p $0 $path; done"
    box.command(manager, f"{RECORD_CALL}case $* in *install*) {lock}{install} ;; esac\n")
    done = box.boot()
    waits = [int(call.split()[1]) for call in box.calls if call.startswith("sleep ")]
    if failures == 3:
        assert (done.returncode, waits) == (0, [5, 10, 15]), done.stdout
    else:
        assert (done.returncode, len(waits)) == (1, 6)
        assert "bootstrap failed: cannot install packages" in done.stdout


@pytest.mark.parametrize("manager", ["apt-get", "dnf"])
def test_libraries_of_the_runner_are_tried_again(box: BootstrapBox, manager: str) -> None:
    box.preinstall()
    box.without("dnf")
    box.command("ldconfig", RECORD_CALL)
    locked = f'{RECORD_CALL}[ "$(grep -c "^$(basename $0)" "$CALLS")" -gt 1 ] || exit 100\n'
    if manager == "dnf":
        box.command("dnf", locked)
    else:
        executable(box.opt / "runner" / "bin" / "installdependencies.sh", locked)
    done = box.boot()
    assert (done.returncode, box.calls.count("sleep 5")) == (0, 1), done.stdout


@pytest.fixture
def apt(box: BootstrapBox, tmp_path: Path) -> Iterator[AptLocks]:
    locks = AptLocks(tmp_path / "apt")
    box.preinstall()
    box.without("dnf")
    for name, text in locks.commands().items():
        box.command(name, text)
    yield locks
    locks.stop()


@pytest.mark.parametrize("unit", AptLocks.HOLDERS)
def test_automatic_updates_are_stopped_before_packages_are_installed(
    box: BootstrapBox, apt: AptLocks, unit: str
) -> None:
    (box.bin / "sudo").unlink()
    (box.bin.with_name("system-commands") / "sudo").unlink(missing_ok=True)
    box.environment["INSTALLS"] = str(box.bin / "sudo")
    apt.start(unit)
    done = box.boot()
    assert done.returncode == 0, done.stdout + done.stderr
    calls = box.calls
    masked = next(number for number, call in enumerate(calls) if call.startswith("systemctl") and " mask " in call)
    assert masked < next(number for number, call in enumerate(calls) if call.startswith("apt-get"))
    timers = {"apt-daily.timer", "apt-daily-upgrade.timer", "unattended-upgrades.service", "dnf-automatic.timer"}
    assert {unit, *timers} <= set(calls[masked].split())


def test_libraries_of_the_runner_wait_for_the_lock_of_dpkg(box: BootstrapBox, apt: AptLocks) -> None:
    """installdependencies.sh calls `apt-get update && apt-get install` itself, without options for locks."""
    box.command("ldconfig", RECORD_CALL)
    executable(
        box.opt / "runner" / "bin" / "installdependencies.sh",
        "#!/bin/sh\napt-get update && apt-get install -y libkrb5-3 zlib1g\n",
    )
    apt.start("apt-daily-upgrade.service")
    done = box.boot()
    assert done.returncode == 0, done.stdout + done.stderr
    assert box.calls.count("apt-get install -y libkrb5-3 zlib1g") == 1, "it waits instead of failing"


def test_failure_to_mask_updates_is_reported(box: BootstrapBox) -> None:
    box.preinstall()
    box.command("systemctl", f'{RECORD_CALL}case "$*" in *mask*) exit 1 ;; esac\n')
    done = box.boot()
    assert done.returncode == 0
    assert "automatic updates cannot be masked" in done.stdout


@pytest.mark.parametrize("mode", [0o777, 0o775])
@pytest.mark.parametrize("name", ["image", "image/lib", "image/opt"])
def test_folders_that_others_can_write_are_reported(box: BootstrapBox, tmp_path: Path, name: str, mode: int) -> None:
    box.layout = MachineLayout(
        opt=f"{tmp_path}/image/opt/remuda", state=f"{tmp_path}/image/lib/remuda", units=str(box.units)
    )
    box.opt = Path(box.layout.opt)
    for folder in ("image", "image/lib", "image/opt"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder).chmod(0o755)
    box.preinstall()
    assert box.boot().returncode == 0
    (tmp_path / name).chmod(mode)
    done = box.boot()
    assert done.returncode == 1
    assert f"bootstrap failed: users other than root can write to {tmp_path / name}; run in the image:" in done.stdout
    assert box.calls.count("systemctl start --no-block remuda-agent.service") == 1, "the second boot starts no agent"


def test_software_of_another_user_is_reported(box: BootstrapBox) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can change owners")
    box.preinstall()
    os.chown(box.opt, 1000, 1000)
    done = box.boot()
    assert (done.returncode, f"can write to {box.opt};" in done.stdout) == (1, True)


@pytest.mark.parametrize("command", sorted({*SANDBOX_COMMANDS} - {"dockerd"}))
def test_command_that_cannot_be_installed_is_reported(box: BootstrapBox, command: str) -> None:
    box.preinstall()
    box.without(command, "dnf")
    done = box.boot()
    assert done.returncode == 1
    assert f"{command} is missing" in done.stdout
    assert not [call for call in box.calls if call.startswith("systemctl start")]


def test_machine_without_docker_is_usable(box: BootstrapBox) -> None:
    box.preinstall()
    box.without("dockerd", "dnf")
    done = box.boot()
    assert (done.returncode, done.stderr) == (0, "")
    assert "dockerd is missing: jobs cannot use docker" in done.stdout


@pytest.mark.parametrize(
    ("kernel", "is_supported"),
    [("4.14.355-277.643.amzn2.x86_64", False), ("5.15.0-1084-aws", False), ("5.19.0-1025-aws", True), ("6.1.0", True)],
)
def test_old_kernels_are_reported(box: BootstrapBox, kernel: str, *, is_supported: bool) -> None:
    box.preinstall()
    box.command("uname", f"#!/bin/sh\ncase $1 in -m) echo x86_64 ;; *) echo {kernel} ;; esac\n")
    done = box.boot()
    assert (done.returncode == 0) is is_supported
    assert (f"the kernel is {kernel}; sandboxes need Linux 5.19" in done.stdout) is not is_supported


def test_machine_with_cgroup_v1_is_reported(box: BootstrapBox) -> None:
    box.preinstall()
    box.command("stat", "#!/bin/sh\necho tmpfs\n")
    done = box.boot()
    assert done.returncode == 1
    assert "does not use cgroup v2" in done.stdout


def test_systemd_networkd_ignores_the_network_of_sandboxes(box: BootstrapBox) -> None:
    box.preinstall()
    assert box.boot().returncode == 0
    text = (box.units.parent / "network" / "10-remuda.network").read_text()
    assert "Name=ve-remuda-*" in text
    assert "Unmanaged=yes" in text
    assert "networkctl reload" in box.calls


def test_user_data_above_the_limit_of_ec2_is_rejected() -> None:
    """16 KiB before base64 encoding, after compression."""
    size = len(compress(user_data({})))
    noise = hashlib.shake_256(b"noise").hexdigest(16_384 - size)
    with pytest.raises(UserError, match="EC2's limit is 16384"):
        user_data({"pre-runner-script": noise})
