"""Versions of the actions runner: the launch options that choose one, and the release that a pool installs."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum
from typing import TypeVar
from urllib.parse import urlsplit

from remuda.domain.errors import UserError
from remuda.domain.resources import MAX_SHOWN

VERSION = "actions-runner-version"
SHA256 = "actions-runner-sha256"
URL = "actions-runner-url"

#: Values of `actions-runner-version` besides a version.
LATEST = "latest"
IMAGE = "image"

#: GitHub refuses to register older runners (GitHub changelog of 2026, "minimum version enforcement").
MINIMUM_VERSION = "2.329.0"
#: GitHub gives no more jobs to a runner without automatic updates this long after the release of a newer version
#: (GitHub documentation, "Runner software updates on self-hosted runners").
REFUSED_AFTER = timedelta(days=30)
#: Time before the refusal from which to warn.
WARN_BEFORE = timedelta(days=7)
#: Time without an answer of GitHub about the newest version after which to warn.
UNCHECKED_AFTER = timedelta(days=7)

#: What the options with one value per architecture expect.
DIGEST_HINT = "the SHA-256 of the package: 64 digits 0-9, a-f"
URL_HINT = "an https:// or s3:// URL that ends in .tar.gz, without a user or a query"

ArchitectureName = TypeVar("ArchitectureName", bound=StrEnum)

_VERSION = re.compile(r"[0-9]{1,4}\.[0-9]{1,5}\.[0-9]{1,5}")
DIGEST = re.compile(r"[0-9a-f]{64}")
#: Without a user, a query or a fragment: the URL becomes part of the launch template, which many can read.
_PACKAGE_URL = re.compile(r"(?:https|s3)://[A-Za-z0-9.-]{1,253}(?::[0-9]{1,5})?/[A-Za-z0-9._~%+/-]{1,1500}\.tar\.gz")


class PackageArchitecture(StrEnum):
    """Processor architectures of runner packages, as GitHub names them."""

    X64 = "x64"
    ARM64 = "arm64"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerPackage:
    """The archive of a release for one architecture."""

    architecture: PackageArchitecture
    url: str
    #: Digest of the archive.
    sha256: str

    def check(self) -> None:
        """Raise `ValueError` if the package cannot be installed."""
        if not is_package_url(self.url) or not is_digest(self.sha256):
            raise ValueError("its URL or its digest is invalid")


def disables_updates(url: str) -> bool:
    """Whether runners that register with this URL do not update themselves.

    Older GitHub Enterprise Servers refuse such runners (actions/runner, ConfigurationManager.cs).
    """
    host = urlsplit(url).hostname or ""
    return host == "github.com" or host.endswith(".ghe.com")


@dataclass(frozen=True, kw_only=True, slots=True)
class ReleaseWarning:
    problem: str
    fix: str

    def __str__(self) -> str:
        return f"{self.problem}: {self.fix}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerRelease:
    """The release that a pool installs, and what refresh knows about newer ones."""

    version: str
    packages: tuple[RunnerPackage, ...]
    #: The newest version at `checked_at`, or empty.
    latest: str = ""
    #: Time of the last answer of GitHub about the newest version.
    checked_at: datetime | None = None
    #: Whether GitHub ever offered this version as the newest.
    was_newest: bool = False
    #: Time at which refresh first saw a newer version, or None. Runners that update themselves are never outdated.
    outdated_since: datetime | None = None

    def check(self) -> None:
        """Raise `ValueError` if the stored release cannot be installed."""
        if not is_version(self.version) or (self.latest and not is_version(self.latest)):
            raise ValueError("its version is invalid")

    @property
    def deadline(self) -> datetime | None:
        """The time from which GitHub may refuse the release; None while there is no newer one.

        If the release was already outdated when refresh first saw it, no one here knows for how long.
        """
        if self.outdated_since is None or not self.was_newest:
            return self.outdated_since
        return self.outdated_since + REFUSED_AFTER

    def warning(self, now: datetime) -> ReleaseWarning | None:
        """Return a warning if GitHub will refuse the release soon, or if that is unknown for long."""
        if self.deadline is not None and now >= self.deadline - WARN_BEFORE:
            refused = "may refuse" if now >= self.deadline else f"refuses from {self.deadline:%Y-%m-%d} on"
            return ReleaseWarning(
                problem=f"GitHub {refused} runners of version {self.version}, because {self.latest} is out",
                fix=f"set {VERSION} to {LATEST}, or to a newer version",
            )
        if self.checked_at is None or now - self.checked_at >= UNCHECKED_AFTER:
            since = f"since {self.checked_at:%Y-%m-%d}" if self.checked_at else "yet"
            return ReleaseWarning(
                problem=f"refresh could not ask GitHub for the newest version of the runner {since}, "
                f"so {self.version} may be outdated",
                fix="check that remuda refresh runs, without --sweep-only and without errors",
            )
        return None

    def launch_options(self) -> dict[str, str]:
        """The launch options that install exactly this release."""
        return {
            VERSION: self.version,
            SHA256: ",".join(f"{item.architecture}={item.sha256}" for item in self.packages),
            URL: ",".join(f"{item.architecture}={item.url}" for item in self.packages),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerChoice:
    """The parsed launch options: `latest`, `image` (also without the option), or a fixed release."""

    version: str
    #: The fixed release, or None.
    release: RunnerRelease | None = None

    @classmethod
    def parse(cls, launch: Mapping[str, str]) -> RunnerChoice:
        version = launch.get(VERSION, "").strip() or IMAGE
        digests = by_architecture(launch, SHA256, DIGEST_HINT, is_digest, PackageArchitecture)
        urls = by_architecture(launch, URL, URL_HINT, is_package_url, PackageArchitecture)
        if version in {LATEST, IMAGE}:
            for name, given in ((SHA256, digests), (URL, urls)):
                if given:
                    raise UserError(
                        f"{name} is set, but {VERSION} is {version!r}",
                        field=name,
                        fix=f"leave {name} out, or set {VERSION} to a version such as 2.336.0",
                    )
            return cls(version=version)
        if not is_version(version):
            raise UserError(
                f"{VERSION} is invalid: {version[:MAX_SHOWN]!r}",
                field=VERSION,
                fix=f"use {LATEST}, {IMAGE} or a version such as 2.336.0",
            )
        if is_newer(MINIMUM_VERSION, version):
            raise UserError(
                f"{VERSION} is {version}, but GitHub registers no runners below {MINIMUM_VERSION}",
                field=VERSION,
                fix=f"use {LATEST}, or {MINIMUM_VERSION} or newer",
            )
        if not digests:
            raise UserError(f"{VERSION} {version!r} needs {SHA256}", field=SHA256, fix=f"set {SHA256} too")
        packages = tuple(
            RunnerPackage(architecture=name, url=urls.get(name) or release_url(version, name), sha256=digest)
            for name, digest in digests.items()
        )
        return cls(version=version, release=RunnerRelease(version=version, packages=packages))


def resolve_release(
    choice: RunnerChoice,
    newest: RunnerRelease | None,
    stored: RunnerRelease | None,
    *,
    now: datetime,
    github_url: str = "https://github.com",
) -> RunnerRelease | None:
    """Return the pool's release after a refresh. None if the image's runner is used, or none is known.

    `newest` is GitHub's answer, or None if there was none. A pool never goes back to an older version by itself: during
    a rollout GitHub's answers may alternate between two versions.
    """
    if choice.version == IMAGE:
        return None
    wanted = choice.release
    if wanted is None:
        wanted = newest
        if stored is not None and (newest is None or (stored.was_newest and is_newer(stored.version, newest.version))):
            wanted = stored
    if wanted is None:
        return None
    known = stored if stored is not None and stored.version == wanted.version else None
    if newest is None:
        return wanted if known is None else replace(known, packages=wanted.packages)
    is_outdated = is_newer(newest.version, wanted.version) and disables_updates(github_url)
    return RunnerRelease(
        version=wanted.version,
        packages=wanted.packages,
        latest=newest.version,
        checked_at=now,
        was_newest=newest.version == wanted.version or (known is not None and known.was_newest),
        outdated_since=((known and known.outdated_since) or now) if is_outdated else None,
    )


def release_url(version: str, architecture: PackageArchitecture) -> str:
    return f"https://github.com/actions/runner/releases/download/v{version}/{package_name(version, architecture)}"


def package_name(version: str, architecture: PackageArchitecture) -> str:
    return f"actions-runner-linux-{architecture}-{version}.tar.gz"


def is_version(text: str) -> bool:
    return _VERSION.fullmatch(text) is not None


def is_digest(text: str) -> bool:
    return DIGEST.fullmatch(text) is not None


def is_package_url(text: str) -> bool:
    return _PACKAGE_URL.fullmatch(text) is not None


def is_newer(version: str, other: str) -> bool:
    """Whether a version is newer than another one."""
    return tuple(map(int, version.split("."))) > tuple(map(int, other.split(".")))


def by_architecture(
    launch: Mapping[str, str],
    name: str,
    expected: str,
    is_valid: Callable[[str], bool],
    architectures: type[ArchitectureName],
) -> dict[ArchitectureName, str]:
    """Parse one value for all architectures, or `x64=…,arm64=…`."""
    text = launch.get(name, "").strip()
    if not text:
        return {}
    if is_valid(text):
        return dict.fromkeys(architectures, text)
    found: dict[ArchitectureName, str] = {}
    for part in text.split(","):
        key, _, value = (word.strip() for word in part.partition("="))
        if key not in {each.value for each in architectures} or not is_valid(value) or key in found:
            # A URL may contain a credential.
            shown = f": {text[:MAX_SHOWN]!r}" if "@" not in text and "?" not in text else ""
            each = ",".join(f"{one}=…" for one in architectures)
            raise UserError(
                f"{name} is invalid{shown}", field=name, fix=f"set {expected}; or one per architecture, {each}"
            )
        found[architectures(key)] = value
    return found
