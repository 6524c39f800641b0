"""Policies and template under external linters, with the service authorization data of AWS."""

from __future__ import annotations

import copy
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from remuda.deployment.policies import policies
from remuda.deployment.statements import fill_placeholders
from tests.support.aws.servers import ROOT, ServerError

PYTHON = ROOT / ".venv-lint" / "bin" / "python"
LINTER = ROOT / "tests" / "support" / "policy_linter.py"
DOCUMENTS = {
    policy.name: fill_placeholders(
        policy,
        pool="ci",
        account="123456789012",
        region="eu-central-1",
        environment="ci",
        credential="arn:aws:secretsmanager:eu-central-1:123456789012:secret:remuda/ci/github-AbCdEf",
        volume_key="arn:aws:kms:eu-central-1:123456789012:key/11111111-2222-3333-4444-555555555555",
        image_key="arn:aws:kms:eu-central-1:123456789012:key/22222222-2222-3333-4444-555555555555",
    )
    for policy in policies()
}


def findings(folder: Path, documents: dict[str, Any]) -> dict[str, list[str]]:
    if not PYTHON.exists():
        raise ServerError("the linters are not installed; run make .venv-lint/.installed")
    files = {name: folder / f"{name}.json" for name in documents}
    for name, file in files.items():
        file.write_text(json.dumps(documents[name]), encoding="utf-8")
    done = subprocess.run([PYTHON, LINTER, *files.values()], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    return {name: found[str(file)] for name, file in files.items()}


def test_linters_find_nothing_in_the_policies(tmp_path):
    assert findings(tmp_path, DOCUMENTS) == {name: [] for name in DOCUMENTS}


@pytest.fixture(scope="module")
def spoiled(tmp_path_factory):
    """Findings in copies of the provision policy with one mistake each."""

    def changed(sid: str, **parts: Any) -> dict[str, Any]:
        document = copy.deepcopy(DOCUMENTS["provision"])
        (statement,) = [each for each in document["Statement"] if each["Sid"] == sid]
        statement.update(parts)
        return document

    own = {"aws:RequestTag/remuda:pool": "ci"}
    return findings(
        tmp_path_factory.mktemp("policies"),
        {
            "action": changed("Describe", Action=["ec2:DescribeMachines"]),
            "resource": changed("PassAgentRole", Resource=["arn:aws:iam::123456789012:user/remuda-ci-agent"]),
            "condition": changed("LaunchTypes", Condition={"StringEquals": {**own, "ec2:InstanceTypes": "c6i.large"}}),
            "operator": changed("LaunchTypes", Condition={"StringMatches": own}),
        },
    )


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("action", "ec2:DescribeMachines does not exist"),
        ("resource", "none of the resources belongs to iam:PassRole"),
        ("condition", "ec2:RunInstances has no condition key ec2:InstanceTypes"),
        ("operator", "parliament: UNKNOWN_OPERATOR"),
    ],
)
def test_linters_find_mistakes(spoiled, name, sentence):
    assert any(sentence in each for each in spoiled[name]), spoiled[name]
