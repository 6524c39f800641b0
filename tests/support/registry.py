"""What the registry answered when this environment was installed: enough for whoever installs the same again."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

#: Where `make` has pip write down what it installed, and from where.
ASKED = Path(sys.prefix) / "install-reports"
#: Part of every virtualenv: nobody asked for them.
GIVEN = frozenset({"pip", "setuptools"})


def answered(folder: Path) -> dict[str, str]:
    """Variables for pip: it finds what is installed here, and does not read what else a registry has, which is most of
    the work. None where not all of it was written down: then it asks.
    """
    reported = [item for file in ASKED.glob("*.json") for item in json.loads(file.read_bytes())["install"]]
    noted = {_known(item["metadata"]["name"], item["metadata"]["version"]) for item in reported}
    here = {_known(item.name, item.version) for item in distributions() if item.name not in GIVEN}
    if not here <= noted:
        return {}
    files = {item["download_info"]["url"]: _digest(item["download_info"]) for item in reported}
    page = folder / "answered.html"
    page.write_text("".join(f'<a href="{url}{digest}">{url}</a>\n' for url, digest in sorted(files.items()) if digest))
    return {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": page.as_uri()}


def _known(name: str, version: str) -> tuple[str, str]:
    return name.lower().replace("_", "-").replace(".", "-"), version


def _digest(download: Mapping[str, Any]) -> str:
    """What an address ends with; empty for what was not downloaded: this package itself."""
    archive = download.get("archive_info", {})
    # Older ones have it in one word.
    digest = archive.get("hashes", {}).get("sha256") or str(archive.get("hash", "")).removeprefix("sha256=")
    return f"#sha256={digest}" if digest else ""
