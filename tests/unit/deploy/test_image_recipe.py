"""The recipe of machine images: its HCL, and the bootstrap with the variables that it sets."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hcl2
import pytest

from remuda.adapters.aws.user_data import MachineLayout
from tests.support.user_data import LIMIT_S, BootstrapBox, fake_imds

ROOT = Path(__file__).parents[3]
RECIPE = ROOT / "deploy" / "image" / "remuda.pkr.hcl"
_REFERENCE = re.compile(r"\b(var|local)\.(\w+)")
_MAPPED = re.compile(r"\$\{local\.(\w+)\[var\.(\w+)\]\}")
_PLAIN = re.compile(r"\$\{(var|local)\.(\w+)\}")


def unquoted(value: Any) -> Any:
    """The document of python-hcl2, which keeps the quotes of strings."""
    if isinstance(value, dict):
        return {unquoted(key): unquoted(each) for key, each in value.items() if not key.startswith("__")}
    if isinstance(value, list):
        return [unquoted(each) for each in value]
    return value[1:-1] if isinstance(value, str) and value.startswith('"') else value


DOCUMENT = unquoted(hcl2.loads(RECIPE.read_text(encoding="utf-8")))
(LOCALS,) = DOCUMENT["locals"]
VARIABLES = {name: block for item in DOCUMENT["variable"] for name, block in item.items()}
(BUILD,) = DOCUMENT["build"]
(PREPARE,) = [item["shell"] for item in BUILD["provisioner"] if "script" in item.get("shell", {})]


def evaluate(text: str, variables: dict[str, str]) -> str:
    """Replace references to variables and locals."""
    text = _MAPPED.sub(lambda found: LOCALS[found[1]][variables[found[2]]], text)
    while found := _PLAIN.search(text):
        value = variables[found[2]] if found[1] == "var" else evaluate(LOCALS[found[2]], variables)
        text = text.replace(found[0], value)
    return text


def test_references_are_declared_and_variables_are_used():
    text = "\n".join(line for line in RECIPE.read_text(encoding="utf-8").splitlines() if not line.startswith("#"))
    used = set(_REFERENCE.findall(text))
    assert {name for kind, name in used if kind == "var"} == set(VARIABLES)
    assert {name for kind, name in used if kind == "local"} == set(LOCALS)
    assert all(block["description"] and block["type"] for block in VARIABLES.values())


def test_the_makefile_names_every_variable_without_a_default():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for name, block in VARIABLES.items():
        assert "default" in block or f"-var {name}=" in makefile


def test_machines_of_the_image_need_the_newer_metadata_service():
    (source,) = [block["runner"] for item in DOCUMENT["source"] for block in item.values()]
    assert source["imds_support"] == "v2.0"
    assert source["metadata_options"] == [{"http_endpoint": "enabled", "http_tokens": "required"}]


@pytest.fixture
def box(tmp_path: Path) -> Iterator[BootstrapBox]:
    with fake_imds() as imds:
        yield BootstrapBox(tmp_path, imds)


@pytest.mark.parametrize("architecture", ["x86_64", "arm64"])
def test_the_recipe_prepares_an_image_that_boots_without_downloads(box: BootstrapBox, architecture: str):
    machine = {"arm64": "aarch64"}.get(architecture, architecture)
    box.command("uname", f"#!/bin/sh\ncase $1 in -m) echo {machine} ;; *) echo 6.8.0 ;; esac\n")
    listener = '#!/bin/sh\n[ "$1" != --version ] || echo 2.336.0\n'
    name = {"arm64": "arm64"}.get(architecture, "x64")
    variables = {
        "architecture": architecture,
        "agent_sha256": box.offer("agent.tar.gz", {"bin/remuda": "#!/bin/sh\n", "lib/remuda.py": ""}),
        "runner_version": "2.336.0",
        "runner_sha256": box.offer(f"actions-runner-linux-{name}-2.336.0.tar.gz", {"bin/Runner.Listener": listener}),
    }
    environment = dict(evaluate(pair, variables).split("=", 1) for pair in PREPARE["environment_vars"])
    assert (environment["opt"], environment["state"]) == (MachineLayout().opt, MachineLayout().state)
    environment |= {"opt": str(box.opt), "state": str(box.state)}
    uploaded = evaluate("${local.uploaded}", variables)
    environment = {key: value.replace(uploaded, str(box.mirror / "agent.tar.gz")) for key, value in environment.items()}
    script = evaluate(PREPARE["script"].replace("${path.root}", str(RECIPE.parent)), variables)
    done = subprocess.run(
        ["bash", script],
        env={**box.environment, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert done.stdout.endswith("remuda: the image is prepared\n")
    masked, stopped = [call for call in box.calls if call.startswith("system")]
    assert masked.startswith("systemctl --quiet mask apt-daily.timer "), "the image does not update itself"
    assert stopped.startswith("systemctl --quiet --no-block stop apt-daily.timer "), "it sets no timer, starts nothing"
    assert box.imds.requests == []
    assert list(box.state.iterdir()) == []
    assert os.access(box.opt / "runner" / "bin" / "Runner.Listener", os.X_OK)

    fetched = [call for call in box.calls if call.startswith("fetch")]
    done = box.boot({"agent-url": "s3://bucket/agent.tar.gz", "agent-sha256": variables["agent_sha256"]})
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert [call for call in box.calls if call.startswith("fetch")] == fetched
    assert "fetching" not in done.stdout
