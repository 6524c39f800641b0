"""Write the address of a fork into everything that names the repository: workflows, docs and the linter's settings.

    python deploy/fork.py                    the repository of the git remote `origin`
    python deploy/fork.py acme/remuda        this one

The address before is in deploy/repository.txt, so that the program can run again after a move or a merge.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))

from remuda.source_repository import (  # noqa: E402 - the module needs no installed package
    UNKNOWN_REPOSITORY,
    URL_NAME,
    of_clone,
    repository_name,
)

__all__ = ["UNKNOWN_REPOSITORY", "URL_NAME", "of_clone", "recorded", "repository_name", "write_address"]

#: OWNER/REPO that the files name now.
RECORD = Path("deploy", "repository.txt")
#: Files of the tree that name the placeholder itself.
_EXCEPT = (":!CHANGELOG.md", ":!src", ":!tests", ":!docs/howto/your-own-fork.md", ":!deploy/fork.py")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]*/[A-Za-z0-9._-]+")


def recorded(root: Path = ROOT) -> str:
    """OWNER/REPO that the files name."""
    return (root / RECORD).read_text(encoding="utf-8").strip()


def files_with(name: str, root: Path = ROOT) -> list[Path]:
    """Files that git tracks and that contain the name."""
    command = ("git", "-C", str(root), "grep", "-l", "-I", "-F", "-e", name, "--", *_EXCEPT)
    listed = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return [root / line for line in listed.splitlines()]


def write_address(name: str, root: Path = ROOT) -> list[Path]:
    """Replace the address in all files. Return those that changed."""
    before = {recorded(root), UNKNOWN_REPOSITORY} - {name}
    found = {path for old in before for path in files_with(old, root)} - {root / RECORD}
    for path in found:
        text = path.read_text(encoding="utf-8")
        for old in before:
            # Not a longer name that contains it.
            text = re.sub(rf"(?<![\w./-]){re.escape(old)}(?![\w-])", name, text)
        path.write_text(text, encoding="utf-8")
    (root / RECORD).write_text(f"{name}\n", encoding="utf-8")
    return sorted(found)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repository", nargs="?", default="", help="OWNER/REPO; default: of the git remote origin")
    name = parser.parse_args(arguments).repository or repository_name(of_clone(ROOT))
    if not name:
        print("the git remote origin names no OWNER/REPO: run make fork REPOSITORY=OWNER/REPO", file=sys.stderr)  # noqa: T201
        return 2
    if not _NAME.fullmatch(name):
        print(f"REPOSITORY must be OWNER/REPO, got {name[:80]!r}", file=sys.stderr)  # noqa: T201
        return 2
    changed = write_address(name)
    lines = [f"{path.relative_to(ROOT)} names {name}" for path in changed]
    print("\n".join(lines) or f"all files name {name} already")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
