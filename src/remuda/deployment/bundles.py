"""Bundles of a release: their location and digests.

A folder or a web address contains the bundles and `SHA256SUMS`, which `make dist` writes. Every bundle is compared with
its digest there before it is used.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from remuda import __version__
from remuda.domain.errors import Unavailable, UserError
from remuda.domain.resources import MAX_SHOWN, Architecture

SUMS = "SHA256SUMS"
#: Built by `make dist` in the working directory.
DIST = Path("dist")
#: Seconds to wait for the next bytes of a download.
TIMEOUT_S = 60.0
_LINE = re.compile(r"([0-9a-f]{64}) [ *]([A-Za-z0-9._+-]+)")
_FIX = "run make dist, or name the folder or address of a release with --dist"


class BundleUse(StrEnum):
    LAMBDA = "lambda"
    AGENT = "agent"


_ENDINGS = {BundleUse.LAMBDA: "zip", BundleUse.AGENT: "tar.gz"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Bundle:
    use: BundleUse
    architecture: str
    sha256: str
    version: str = __version__

    @property
    def name(self) -> str:
        return bundle_name(self.use, self.architecture, self.version)

    @property
    def key(self) -> str:
        """The key in the bucket. With the digest in it, CloudFormation notices other content."""
        return f"{self.use}/{self.sha256}/{self.name}"


def bundle_name(use: BundleUse, architecture: str, version: str = __version__) -> str:
    return f"remuda-{use}-{version}-{architecture}.{_ENDINGS[use]}"


class BundleSource:
    """A folder, or the address of a release."""

    def __init__(self, location: str) -> None:
        self.location = location.rstrip("/")

    @classmethod
    def default(cls, repository: str, folder: Path = DIST) -> BundleSource:
        """`dist` in the working directory if it has bundles of this version, else the release in this repository.

        `repository` is the address of Remuda's repository, or empty if it is not known.
        """
        sums = folder / SUMS
        if sums.is_file() and f"-{__version__}-" in sums.read_text(encoding="utf-8", errors="replace"):
            return cls(str(folder))
        if not repository:
            raise UserError(
                f"{folder} has no bundles of version {__version__}, and the repository with the release is not known",
                field="--dist",
                fix="run make dist in a clone of Remuda, and give its folder dist with --dist",
            )
        return cls(f"{repository}/releases/download/v{__version__}")

    @property
    def is_address(self) -> bool:
        return self.location.startswith("https://")

    async def list(self) -> tuple[Bundle, ...]:
        """The bundles of this version for Lambda and for agents. Fails if one of them is missing."""
        digests = parse_sums((await self._read(SUMS)).decode("utf-8", "replace"))
        found = tuple(
            Bundle(use=use, architecture=architecture, sha256=digests[name])
            for use in BundleUse
            for architecture in Architecture
            if (name := bundle_name(use, architecture)) in digests
        )
        for use in BundleUse:
            if not any(bundle.use is use for bundle in found):
                raise UserError(
                    f"{self.location}/{SUMS} lists no {bundle_name(use, '<architecture>')}",
                    field="--dist",
                    fix=_FIX,
                )
        return found

    async def read(self, bundle: Bundle) -> bytes:
        """The content, compared with its digest."""
        content = await self._read(bundle.name)
        found = hashlib.sha256(content).hexdigest()
        if found != bundle.sha256:
            raise UserError(
                f"{self.location}/{bundle.name} has the SHA-256 {found}, and {SUMS} lists {bundle.sha256}",
                field="--dist",
                fix="build or download the bundle again",
            )
        return content

    async def _read(self, name: str) -> bytes:
        if self.is_address:
            return await self._download(f"{self.location}/{name}")
        try:
            return await asyncio.to_thread((Path(self.location) / name).read_bytes)
        except OSError as error:
            raise UserError(
                f"{self.location}/{name} cannot be read: {error.strerror}", field="--dist", fix=_FIX
            ) from None

    async def _download(self, url: str) -> bytes:
        import httpx  # noqa: PLC0415 - slow to import

        try:
            async with httpx.AsyncClient(follow_redirects=True, timeout=TIMEOUT_S) as client:
                response = await client.get(url)
        except httpx.HTTPError as error:
            raise Unavailable(f"{url} cannot be downloaded: {type(error).__name__}", fix=_FIX) from None
        if insecure := [str(item.url) for item in (*response.history, response) if item.url.scheme != "https"]:
            raise UserError(f"{url} redirects to {insecure[0][:MAX_SHOWN]}, not to https://", field="--dist", fix=_FIX)
        if not response.is_success:
            raise UserError(f"{url} answers with {response.status_code}", field="--dist", fix=_FIX)
        return response.content


def parse_sums(text: str) -> Mapping[str, str]:
    """Digests by file name, from the output of `sha256sum`."""
    return {found[2]: found[1] for line in text.splitlines() if (found := _LINE.fullmatch(line.strip()))}


def check_location(text: str) -> BundleSource:
    """A folder that exists, or an https:// address."""
    source = BundleSource(text)
    if not source.is_address and not Path(text).is_dir():
        raise UserError(f"--dist must be a folder or an https:// address, got {text[:80]!r}", field="--dist", fix=_FIX)
    return source
