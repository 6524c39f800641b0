"""Writer of the bill of materials in CycloneDX format, from a list of packages on stdin. Validates what it writes.

Runs in the virtualenv of the linters, which has the CycloneDX library.
"""

from __future__ import annotations

import hashlib
import json
import sys
import uuid
from datetime import UTC, datetime
from typing import Any

from cyclonedx.factory.license import LicenseFactory
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL


def component(name: str, version: str, terms: str, kind: ComponentType) -> Component:
    url = PackageURL(type="pypi", name=name, version=version)
    licenses = [LicenseFactory().make_from_string(terms)] if terms else []
    return Component(name=name, version=version, type=kind, purl=url, bom_ref=str(url), licenses=licenses)


def bill(document: dict[str, Any]) -> str:
    """The same packages give the same text: number and time do not depend on the build."""
    content = json.dumps(document, sort_keys=True).encode()
    bom = Bom(serial_number=uuid.UUID(bytes=hashlib.sha256(content).digest()[:16], version=4))
    bom.metadata.timestamp = datetime.fromtimestamp(document["epoch"], tz=UTC)
    remuda = component("remuda", document["version"], "MIT", ComponentType.APPLICATION)
    bom.metadata.component = remuda
    for item in document["components"]:
        bom.components.add(component(item["name"], item["version"], item["license"], ComponentType.LIBRARY))
    bom.register_dependency(remuda, bom.components)
    return str(JsonV1Dot6(bom).output_as_string(indent=2)) + "\n"


def main() -> int:
    text = bill(json.load(sys.stdin))
    problem = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
    if problem is not None:
        sys.exit(f"the bill of materials does not match the CycloneDX schema: {str(problem.data)[:500]}")
    sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
