"""The Terraform module with Terraform itself and the AWS provider, on a test server.

Skipped without Terraform, or if the provider cannot be installed: without its registry, set TF_CLI_CONFIG_FILE to a
configuration with a mirror of the provider. REMUDA_AWS_PROVIDER_5=yes tests a copy of the module for version 5 of the
provider: it leaves out the one argument that version 5 does not have.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from terraform_module import MODULE
from tests.support.aws.ec2 import shared_ec2_server
from tests.support.aws.servers import REGION, aws_client
from tests.support.terraform import TerraformModule
from tests.support.terraform_twins import EVERYTHING, stack_of, stacked, twins, variable_name, variables_of

SERVICES = (
    "cloudwatch",
    "dynamodb",
    "events",
    "iam",
    "lambda",
    "logs",
    "s3",
    "sns",
    "sqs",
    "ssm",
    "sts",
    "secretsmanager",
)
FOR_VERSION_5 = os.environ.get("REMUDA_AWS_PROVIDER_5") == "yes"
URL_ONLY = "invoked_via_function_url"
#: No call to another endpoint than the test server's.
PROVIDER = """
provider "aws" {{
  region                      = "{region}"
  access_key                  = "test"
  secret_key                  = "test"
  s3_use_path_style           = true
  skip_credentials_validation = true
  skip_metadata_api_check     = true

  endpoints {{
{endpoints}
  }}
}}
"""


class TerraformFolder:
    """A root module with a provider that calls the test server."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        endpoints = "\n".join(f'    {service} = "{shared_ec2_server().url}"' for service in SERVICES)
        # An override file replaces the provider of the example.
        (folder / "provider_override.tf").write_text(PROVIDER.format(region=REGION, endpoints=endpoints), "utf-8")
        self._environment = {**os.environ, "TF_IN_AUTOMATION": "1", "TF_INPUT": "0", "CHECKPOINT_DISABLE": "1"}
        init = self.run("init", accepted=(0, 1))
        if init.returncode:
            pytest.skip(f"terraform init failed: {' '.join(init.stderr.split())[:200]}")

    def run(self, *arguments: str, accepted: tuple[int, ...] = (0,)) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            ["terraform", arguments[0], "-no-color", *arguments[1:]],
            cwd=self.folder,
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=240,
        )
        assert done.returncode in accepted, done.stdout + done.stderr
        return done

    def plan(self, variables: Mapping[str, Any]) -> Any:
        (self.folder / "terraform.tfvars.json").write_text(json.dumps(variables), "utf-8")
        self.run("plan", "-out=plan")
        return json.loads(self.run("show", "-json", "plan").stdout)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the module, because Terraform writes files beside it."""
    if not shutil.which("terraform"):
        pytest.skip("terraform is not installed")
    made = tmp_path_factory.mktemp("terraform") / "module"
    shutil.copytree(MODULE, made)
    if FOR_VERSION_5:
        for file in made.rglob("*.tf"):
            text = file.read_text("utf-8").replace(">= 6.28, < 7.0", "~> 5.100")
            text = text.replace("data.aws_region.current.region", "data.aws_region.current.name")
            file.write_text(re.sub(f" +{URL_ONLY} .*\n", "", text), "utf-8")
    return made


def _package(file: Path) -> bytes:
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("remuda/__init__.py", "")
    return file.read_bytes()


def test_the_example_can_be_planned_from_nothing(copy, tmp_path):
    """Roles and alarms depend on resources that the same plan creates."""
    example = TerraformFolder(copy / "examples" / "complete")
    example.run("fmt", "-check", "-recursive", str(MODULE))
    (tmp_path / "remuda-agent-1.0.0-x86_64.tar.gz").write_bytes(b"agent")
    _package(tmp_path / "remuda-lambda-1.0.0-x86_64.zip")
    given = {
        "scope": "acme/app",
        "repositories": ["acme/app"],
        "dist": str(tmp_path),
        "release": "1.0.0",
        "subnet_ids": ["subnet-1"],
        "security_group_ids": ["sg-1"],
    }
    made = {each["address"] for each in example.plan(given)["resource_changes"]}
    assert "module.remuda.aws_iam_role.workflow[0]" in made
    assert 'module.remuda.aws_cloudwatch_metric_alarm.this["refresh"]' in made


async def test_terraform_creates_what_the_template_creates(copy, tmp_path):
    """The plan after an apply against the evaluated template; this also checks both evaluators of the unit tests."""
    async with aws_client("s3", shared_ec2_server().url) as s3:
        await s3.create_bucket(
            Bucket=EVERYTHING["CodeBucket"], CreateBucketConfiguration={"LocationConstraint": REGION}
        )
        package = _package(tmp_path / "code.zip")
        await s3.put_object(Bucket=EVERYTHING["CodeBucket"], Key=EVERYTHING["CodeKey"], Body=package)
    root, stack = TerraformFolder(copy), stack_of(EVERYTHING)
    variables = variables_of(TerraformModule.load(MODULE), EVERYTHING)
    root.plan(variables)
    root.run("apply", "plan")
    # Known values only: what the provider reads back, and what it would change again.
    plan = root.plan(variables)
    changed = {each["type"] for each in plan["resource_changes"] if each["change"]["actions"] != ["no-op"]}
    # The test server does not keep the log group of a function.
    assert changed == {"aws_lambda_function"}
    resources = plan["planned_values"]["root_module"]["resources"]
    found = twins((each["type"], each["values"]) for each in resources if each["mode"] == "managed")
    expected = stacked(stack)
    if FOR_VERSION_5:
        expected["AWS::Lambda::Permission", "remuda-ci-broker lambda:InvokeFunction"].pop("InvokedViaFunctionUrl")
    assert sorted(found) == sorted(expected)
    for key, properties in expected.items():
        assert found[key] == properties, key
    outputs = {name: each["value"] for name, each in plan["planned_values"]["outputs"].items()}
    # The server chooses the address of a function URL.
    assert outputs.pop("broker_url").startswith("https://")
    assert outputs == {variable_name(name): value for name, value in stack.outputs.items() if name != "BrokerUrl"}
