"""The image of the listener: its Dockerfile, parsed, and the command to run it."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from remuda.cli.main import app
from remuda.deployment.policies import policies
from remuda.deployment.workflow import container_text

ROOT = Path(__file__).parents[3]
DOCKERFILE = ROOT / "deploy" / "Dockerfile"


def instructions() -> list[tuple[str, str]]:
    """Instructions with their arguments, without comments and line breaks."""
    lines = [line for line in DOCKERFILE.read_text("utf-8").splitlines() if not line.startswith("#")]
    text = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in text.splitlines() if line)]


def last(name: str) -> str:
    return [rest for each, rest in instructions() if each == name][-1]


def test_base_image_is_a_pinned_slim_one_without_a_registry():
    bases = [rest.split()[0] for name, rest in instructions() if name == "FROM"]
    assert set(bases) == {"python:3.13-slim-bookworm"}


def test_copied_files_exist_and_are_not_ignored():
    ignored = (DOCKERFILE.parent / "Dockerfile.dockerignore").read_text("utf-8").splitlines()
    copied = [shlex.split(rest) for name, rest in instructions() if name == "COPY"]
    sources = [words[0] for words in copied if not words[0].startswith("--from")]
    assert sorted(sources) == ["requirements/bundle.txt", "src/remuda"]
    for source in sources:
        assert (ROOT / source).exists()
        assert f"!{source}" in ignored


def test_packages_are_wheels_with_hashes():
    (install,) = [rest for name, rest in instructions() if name == "RUN" and "pip" in rest]
    words = install.split()
    assert {"--require-hashes", "--no-deps", "--only-binary"} <= set(words)
    requirements = (ROOT / "requirements" / "bundle.txt").read_text("utf-8")
    for entry in re.split(r"\n(?=\S)", requirements.strip()):
        assert "==" in entry.splitlines()[0]
        assert "--hash=sha256:" in entry
    # No address of a registry.
    assert "://" not in DOCKERFILE.read_text("utf-8")


def test_container_runs_the_listener_as_another_user_with_a_health_check():
    user, _, group = last("USER").partition(":")
    assert int(user) >= 1_000
    assert int(group) >= 1_000
    command = json.loads(last("ENTRYPOINT")) + json.loads(last("CMD"))
    assert command[:3] == ["python", "-m", "remuda"]
    (file,) = command[command.index("--alive-file") + 1 :]
    assert f"find {file} -mmin -3" in last("HEALTHCHECK")
    listen = app.commands["listen"]
    assert "--alive-file" in {name for item in listen.params for name in item.opts}


@pytest.mark.parametrize("is_app", [True, False])
def test_command_has_the_variables_and_policies_and_no_credential(*, is_app: bool):
    secret = "arn:aws:secretsmanager:eu-central-1:123456789012:secret:remuda/ci/github-Ab12Cd"
    text = container_text(pool="ci", region="eu-central-1", secret=secret, is_app=is_app)
    command = shlex.split(text.partition("docker run")[2].partition("\n\n")[0].replace("\\\n", " "))
    variables = dict(word.split("=", 1) for word in command if "=" in word)
    assert variables == {
        "AWS_REGION": "eu-central-1",
        "REMUDA_POOL": "ci",
        "REMUDA_GITHUB_APP_KEY" if is_app else "REMUDA_GITHUB_TOKEN": secret,
        "REMUDA_SETTINGS_PARAMETER": "/remuda/ci/settings",
    }
    names = {policy.name for policy in policies()}
    found = set(re.findall(r"remuda-ci-([a-z-]+)", text))
    assert found == {"provision", "listener"} <= names
