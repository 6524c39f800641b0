"""The machine of the listener: its user data, run with fake system commands such as systemctl, and its heartbeat."""

from __future__ import annotations

import base64
import configparser
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from remuda.adapters.aws.launch import HOOK
from remuda.adapters.aws.user_data import MAX_BYTES
from remuda.deployment.template import HAS_LISTENER
from tests.support.fake_s3 import FakeS3, fake_s3
from tests.support.terraform_twins import LISTENER, SECRET, stack_of
from tests.support.user_data import INSTANCE_ID, LIMIT_S, RECORD_CALL, BootstrapBox, fake_imds

CREDENTIALS = {"AccessKeyId": "ASIAEXAMPLE", "SecretAccessKey": "secret-key-of-the-role", "Token": "token-of-the-role"}
ARCHITECTURE = "arm64" if os.uname().machine == "aarch64" else "x86_64"
OTHER = {"arm64": "x86_64", "x86_64": "arm64"}[ARCHITECTURE]
#: A program that works.
PROGRAM = "#!/bin/sh\n"


def template_of(**parameters: str) -> dict[str, Any]:
    _, properties = stack_of({**LISTENER, **parameters}).resources["ListenerTemplate"]
    data: dict[str, Any] = properties["LaunchTemplateData"]
    return data


def user_data(**parameters: str) -> str:
    return base64.b64decode(template_of(**parameters)["UserData"]).decode()


@pytest.fixture
def box(tmp_path: Path) -> Iterator[BootstrapBox]:
    with fake_imds() as imds:
        yield BootstrapBox(tmp_path, imds)


@pytest.fixture
def s3(box: BootstrapBox) -> Iterator[FakeS3]:
    box.imds.set_credentials("remuda-ci-listener", CREDENTIALS)
    with fake_s3("eu-central-1", {CREDENTIALS["AccessKeyId"]: CREDENTIALS}.get) as server:
        box.environment["AWS_ENDPOINT_URL_S3"] = server.url
        yield server


def offered(box: BootstrapBox, s3: FakeS3, files: Mapping[str, str] | None = None) -> dict[str, str]:
    """Parameters of a bundle in the bucket."""
    digest = box.offer("agent.tar.gz", dict(files or {"bin/remuda": PROGRAM}))
    s3.objects["/b/agent/1/agent.tar.gz"] = (box.mirror / "agent.tar.gz").read_bytes()
    return {
        "AgentUrl": f"{OTHER}=s3://b/agent/0/other.tar.gz,{ARCHITECTURE}=s3://b/agent/1/agent.tar.gz",
        "AgentSha256": f"{OTHER}={'0' * 64},{ARCHITECTURE}={digest}",
    }


def boot(box: BootstrapBox, **parameters: str) -> subprocess.CompletedProcess[str]:
    box.units.mkdir()
    places = f"opt={box.opt} etc={box.state} units={box.units}\n"
    text = user_data(**parameters).replace("opt=/opt/remuda etc=/etc/remuda units=/etc/systemd/system\n", places)
    assert places in text
    return subprocess.run(
        ["bash"], input=text, env=box.environment, capture_output=True, text=True, check=False, timeout=LIMIT_S
    )


def test_user_data_is_valid_bash_within_the_size_limit():
    text = user_data()
    # Not compressed: CloudFormation cannot.
    assert len(text.encode()) < MAX_BYTES
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed (apt-get install shellcheck): the user data is not linted")
    command = ["shellcheck", "--severity=style", "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert done.stdout == ""


def test_listener_is_installed_with_the_role_of_its_machine(box: BootstrapBox, s3: FakeS3):
    done = boot(box, **offered(box, s3))
    assert done.returncode == 0, done.stdout + done.stderr
    assert s3.requests == ["/b/agent/1/agent.tar.gz"]
    assert "systemctl start --no-block remuda-listener.service" in box.calls
    assert (box.state / "listener.env").read_text().splitlines() == [
        "AWS_REGION=eu-central-1",
        f"REMUDA_LISTENER_INSTANCE={INSTANCE_ID}",
        "REMUDA_BACKEND=aws",
        "REMUDA_POOL=ci",
        f"REMUDA_GITHUB_TOKEN={SECRET}",
        "REMUDA_GITHUB_APP_KEY=",
        "REMUDA_SETTINGS_PARAMETER=/remuda/ci/settings",
        "REMUDA_LISTENER_GROUP=remuda-ci-listener",
        "REMUDA_LISTENER_STACK=arn:aws:cloudformation:eu-central-1:123456789012:stack/remuda-ci/*",
    ]
    unit = configparser.RawConfigParser(strict=True)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(box.units / "remuda-listener.service")
    service = unit["Service"]
    assert service["ExecStart"] == f"{box.opt}/bin/remuda listen"
    assert (service["Restart"], service["DynamicUser"], service["CapabilityBoundingSet"]) == ("always", "yes", "")
    assert service["ProtectSystem"] == "strict"


def test_key_of_an_app_is_passed_as_its_arn():
    text = user_data(GithubAppId="1")
    assert f"'REMUDA_GITHUB_APP_KEY={SECRET}'" in text
    assert "'REMUDA_GITHUB_TOKEN='" in text


@pytest.mark.parametrize("problem", ["other digest", "no bundle", "broken program"])
def test_machine_without_a_listener_stops_so_that_its_group_replaces_it(box: BootstrapBox, s3: FakeS3, problem: str):
    box.no_pauses()
    files = {"bin/remuda": "#!/bin/sh\nexit 2\n"} if problem == "broken program" else None
    parameters = offered(box, s3, files)
    if problem == "other digest":
        parameters["AgentSha256"] = "0" * 64
    elif problem == "no bundle":
        parameters["AgentUrl"] = f"{OTHER}=s3://b/agent/0/other.tar.gz"
    done = boot(box, **parameters)
    assert done.returncode == 1
    assert "remuda: bootstrap failed" in done.stdout
    assert "shutdown -P +1" in box.calls
    assert not [call for call in box.calls if call.startswith("systemctl start")]


def test_older_images_get_a_supported_python(box: BootstrapBox, s3: FakeS3):
    program = f"#!/bin/sh\n[ -e {box.state}/installed ]\n"
    box.command("apt-get", f"{RECORD_CALL}touch {box.state}/installed\n")
    box.without("dnf")
    done = boot(box, **offered(box, s3, {"bin/remuda": program}))
    assert done.returncode == 0, done.stdout + done.stderr
    assert [call for call in box.calls if call.startswith("apt-get") and call.endswith("python3.11")]


def test_instance_has_no_key_no_older_metadata_service_and_an_encrypted_disk():
    data = template_of()
    assert "KeyName" not in data
    assert (data["MetadataOptions"]["HttpTokens"], data["MetadataOptions"]["HttpPutResponseHopLimit"]) == (
        "required",
        1,
    )
    assert [device["Ebs"]["Encrypted"] for device in data["BlockDeviceMappings"]] == [True]
    # Its security groups are those of the machines; `remuda deploy` creates one without inbound rules.
    assert data["SecurityGroupIds"] == ["sg-1", "sg-2"]


def test_one_instance_runs_and_a_second_one_only_during_a_replacement():
    stack = stack_of(LISTENER)
    _, group = stack.resources["ListenerGroup"]
    assert (group["MinSize"], group["DesiredCapacity"], group["MaxSize"]) == ("1", "1", "2")
    rolling = stack.template["Resources"]["ListenerGroup"]["UpdatePolicy"]["AutoScalingRollingUpdate"]
    assert rolling["MinInstancesInService"] == 1
    # Without the signal of a listener that works, the update is rolled back and the old instance stays.
    assert (rolling["WaitOnResourceSignals"], rolling["PauseTime"]) == (True, "PT15M")
    _, hook = stack.resources["ListenerHook"]
    assert hook == {
        "AutoScalingGroupName": group["AutoScalingGroupName"],
        "LifecycleHookName": HOOK,
        "LifecycleTransition": "autoscaling:EC2_INSTANCE_LAUNCHING",
        "DefaultResult": "ABANDON",
        "HeartbeatTimeout": 600,
    }
    assert stack.template["Resources"]["ListenerGroup"]["Condition"] == HAS_LISTENER


def test_another_bundle_changes_the_user_data_so_that_the_instance_is_replaced():
    assert user_data(AgentSha256="1" * 64) != user_data(AgentSha256="2" * 64)
    assert user_data(MaxUses="7") == user_data(MaxUses="8"), "the process reads settings itself"
