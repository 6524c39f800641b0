"""The bill of materials, written and validated by the CycloneDX library in the virtualenv of the linters."""

from __future__ import annotations

import json
import subprocess
import zipfile
from pathlib import Path

import pytest

import bundles
import release

PYTHON = release.ROOT / ".venv-lint" / "bin" / "python"

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="the linters are not installed (make check)")


def lambda_bundle(folder: Path) -> None:
    texts = {
        "aiohttp": "Name: aiohttp\nVersion: 3.14.5\nLicense-Expression: Apache-2.0 AND MIT\n",
        "PyJWT": "Name: PyJWT\nVersion: 2.15.1\nLicense: MIT\n",
        "odd": "Name: odd\nVersion: 1\nLicense: The license\n        on two lines\n\nLicense: ignored",
    }
    with zipfile.ZipFile(folder / "remuda-lambda-0.1.0-x86_64.zip", "w") as archive:
        for name, text in texts.items():
            archive.writestr(f"{name}-1.dist-info/METADATA", text)


def test_sbom_lists_the_packages_of_the_bundles_and_is_reproducible(tmp_path: Path):
    lambda_bundle(tmp_path)
    release.write_sbom(tmp_path, PYTHON)
    first = (tmp_path / release.SBOM).read_bytes()
    document = json.loads(first)
    assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", "1.6")
    assert document["metadata"]["component"]["purl"] == f"pkg:pypi/remuda@{bundles.version()}"
    listed = {item["purl"]: item.get("licenses") for item in document["components"]}
    assert listed == {
        "pkg:pypi/aiohttp@3.14.5": [{"expression": "Apache-2.0 AND MIT"}],
        "pkg:pypi/pyjwt@2.15.1": [{"license": {"id": "MIT"}}],
        "pkg:pypi/odd@1": None,
    }
    release.write_sbom(tmp_path, PYTHON)
    assert (tmp_path / release.SBOM).read_bytes() == first


def test_a_document_that_does_not_match_the_schema_is_refused():
    bad = {"version": "1", "epoch": 0, "components": [{"name": "a", "version": "1", "license": "MIT"}] * 2}
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); import sbom; "
        'sbom.bill = lambda _: \'{"bomFormat": "CycloneDX"}\'; sbom.main()'
    )
    done = subprocess.run(
        [PYTHON, "-c", program, release.ROOT / "deploy"],
        input=json.dumps(bad),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "does not match the CycloneDX schema" in done.stderr
