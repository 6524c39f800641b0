"""A page of download links with which pip reinstalls the packages of this environment without querying the index."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

#: Folder in which `make` keeps the installation reports of pip.
REPORTS = Path(sys.prefix) / "install-reports"
#: Part of every virtualenv, and so in no report.
PREINSTALLED = frozenset({"pip", "setuptools"})


def offline_index(folder: Path) -> dict[str, str]:
    """Environment variables that make pip use the links, which saves most of its time. Empty if the reports do not
    cover all installed packages; pip then queries the index.
    """
    reported = [item for file in REPORTS.glob("*.json") for item in json.loads(file.read_bytes())["install"]]
    in_reports = {_normalized(item["metadata"]["name"], item["metadata"]["version"]) for item in reported}
    installed = {_normalized(item.name, item.version) for item in distributions() if item.name not in PREINSTALLED}
    if not installed <= in_reports:
        return {}
    files = {item["download_info"]["url"]: _digest(item["download_info"]) for item in reported}
    page = folder / "links.html"
    page.write_text("".join(f'<a href="{url}{digest}">{url}</a>\n' for url, digest in sorted(files.items()) if digest))
    return {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": page.as_uri()}


def _normalized(name: str, version: str) -> tuple[str, str]:
    return name.lower().replace("_", "-").replace(".", "-"), version


def _digest(download: Mapping[str, Any]) -> str:
    """The fragment of the link; empty for a package that was not downloaded, such as this one."""
    archive = download.get("archive_info", {})
    # Older versions of pip report a single field.
    digest = archive.get("hashes", {}).get("sha256") or str(archive.get("hash", "")).removeprefix("sha256=")
    return f"#sha256={digest}" if digest else ""
