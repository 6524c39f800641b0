"""The GitHub repository that this copy of Remuda comes from: a workflow names it (`uses: OWNER/REPO@v0.1.0`), and it
has the downloads of releases and the documentation.

A package that `make dist` has built knows it from its metadata. A clone knows it from its git remote:

    git remote get-url origin                git@github.com:acme/remuda.git
    find_source_repository()                 "https://github.com/acme/remuda"
"""

from __future__ import annotations

import re
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path
from urllib.parse import urlsplit

#: Stands in samples for a repository that is not known. No account on GitHub can have this name.
UNKNOWN_REPOSITORY = "YOUR_ORG/remuda"
#: The heading of the address in the package's metadata; deploy/release.py writes it.
URL_NAME = "Source"
#: Seconds for git to read a file.
GIT_LIMIT_S = 10.0
#: scp-like and URL forms: git@HOST:OWNER/REPO.git, ssh://git@HOST/OWNER/REPO, https://HOST/OWNER/REPO.git.
_REMOTE = re.compile(
    r"(?:https://(?:[^/@\s]*@)?|ssh://(?:[^/@\s]*@)?|[^/@:\s]+@)(?P<host>[A-Za-z0-9.-]+)(?::[0-9]+/|[:/])"
    r"(?P<owner>[A-Za-z0-9][A-Za-z0-9-]*)/(?P<name>[A-Za-z0-9._-]+?)(?:\.git)?/?"
)
_CLONE = Path(__file__).parents[2]


@cache
def find_source_repository(clone: Path = _CLONE) -> str:
    """The address of the repository without a slash at its end, or empty if it is not known."""
    return _of_package() or of_clone(clone)


def documentation(page: str) -> str:
    """Where a reader finds a page, given as its path in the repository: an address if the repository is known."""
    repository = find_source_repository()
    return f"{repository}/blob/main/{page}" if repository else page


def repository_name(address: str) -> str:
    """OWNER/REPO of an address."""
    return urlsplit(address).path.strip("/")


def _of_package() -> str:
    try:
        urls = metadata("remuda").get_all("Project-URL") or []
    except PackageNotFoundError:
        return ""
    named = dict(url.split(", ", 1) for url in urls if ", " in url)
    return address_of_remote(named.get(URL_NAME, ""))


def of_clone(folder: Path) -> str:
    """The address of the remote `origin` of a clone, or empty."""
    # Not of a repository that merely contains the folder, such as one with a virtualenv in it.
    if not (folder / ".git").exists():
        return ""
    command = ("git", "-C", str(folder), "config", "--get", "remote.origin.url")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=GIT_LIMIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return address_of_remote(done.stdout.strip())


def address_of_remote(remote: str) -> str:
    """The web address of a git remote, or empty if it is a path or has no owner and name. It has no credential."""
    found = _REMOTE.fullmatch(remote)
    return f"https://{found['host']}/{found['owner']}/{found['name']}" if found else ""
