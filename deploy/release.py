"""Builder of a release: wheel, source distribution, bundles, SBOM and SHA256SUMS. Builds are reproducible.

Refuses to build if the version is not the same everywhere, or not that of the tag.
"""

from __future__ import annotations

import argparse
import email.parser
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import bundles
import fork
from fork import URL_NAME

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
SUMS = "SHA256SUMS"
SBOM = "sbom.cdx.json"
#: The digests of a release, from which the action knows its bundle. No built file contains it.
ACTION_SUMS = Path("deploy", "action", SUMS)
#: What the wheel is built from. A copy, because setuptools also packs files that earlier builds left in the folder.
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "src")
#: The earliest time in a zip file, as SOURCE_DATE_EPOCH: the wheel's files have no other time.
EPOCH_S = 315_532_800
UNRELEASED = "Unreleased"
_HEADING = re.compile(r"^## \[?([^\]\s]+)\]?(?: - (\d{4}-\d{2}-\d{2}))?$", re.MULTILINE)
#: The most lines that the section of a version in the changelog may have.
MAX_SECTION_LINES = 40


def tag_name(environment: Mapping[str, str]) -> str:
    """The tag that a workflow builds, or empty."""
    return environment.get("GITHUB_REF_NAME", "") if environment.get("GITHUB_REF_TYPE") == "tag" else ""


def version_problems(environment: Mapping[str, str], root: Path = ROOT) -> list[str]:
    """Places whose version differs from that of pyproject.toml."""
    version = bundles.version(root)
    problems = []
    code = re.search(r'__version__ = "(.*)"', (root / "src" / "remuda" / "__init__.py").read_text(encoding="utf-8"))
    if code is None or code[1] != version:
        problems.append(f"src/remuda/__init__.py must have __version__ = {version!r}")
    tag = tag_name(environment)
    problems += changelog_problems((root / "CHANGELOG.md").read_text(encoding="utf-8"), version, is_tag=bool(tag))
    if tag and tag != f"v{version}":
        problems.append(f"the tag is {tag!r}, but the version is {version}")
    uses = re.compile(rf"uses: {re.escape(fork.recorded(root))}@v(\S+)")
    for file in sorted([*root.glob("deploy/workflows/*.yml"), *root.glob("docs/**/*.md"), root / "README.md"]):
        named = {name for name in uses.findall(file.read_text(encoding="utf-8")) if name != version}
        if named:
            problems.append(f"{file.relative_to(root)} uses version {', '.join(sorted(named))}, not {version}")
    return problems


def changelog_problems(text: str, version: str, *, is_tag: bool) -> list[str]:
    """A version needs a dated section of a size that people read; changes after it are in "Unreleased"."""
    sections = {
        name: (date, text[found.end() :]) for found in _HEADING.finditer(text) for name, date in [found.groups()]
    }
    newest = next(iter(sections), "")
    expected = {version} if is_tag else {version, UNRELEASED}
    problems = []
    if newest not in expected:
        problems.append(f"the newest heading of CHANGELOG.md must be {' or '.join(sorted(expected))}")
    date, rest = sections.get(version, ("", ""))
    if not date:
        problems.append(f"CHANGELOG.md must have a heading '## {version} - YYYY-MM-DD'")
    lines = len(rest.partition("\n## ")[0].strip().splitlines())
    if lines > MAX_SECTION_LINES:
        problems.append(
            f"the section {version} of CHANGELOG.md has {lines} lines, at most {MAX_SECTION_LINES} are read"
        )
    return problems


def release_problems(root: Path = ROOT) -> list[str]:
    """What a maintainer still has to do for a release from this tree, beside the version."""
    version = bundles.version(root)
    problems = []
    if fork.recorded(root) == fork.UNKNOWN_REPOSITORY:
        problems.append(f"files name {fork.UNKNOWN_REPOSITORY}: run make fork")
    if not fork.repository_name(fork.of_clone(root)):
        problems.append("the git remote origin names no OWNER/REPO: packages would not know where they come from")
    sums = root / ACTION_SUMS
    if not sums.exists():
        problems.append(f"{ACTION_SUMS} is missing: run make dist, copy dist/{SUMS} there, and commit it")
    elif (root / "dist" / SUMS).exists() and (root / "dist" / SUMS).read_bytes() != sums.read_bytes():
        problems.append(f"{ACTION_SUMS} differs from dist/{SUMS}: copy it again")
    status = _git(root, "status", "--porcelain")
    if status:
        problems.append(f"{len(status.splitlines())} files are not committed")
    if f"v{version}" not in _git(root, "tag", "--points-at", "HEAD").split():
        problems.append(
            f"HEAD has no tag v{version}: git tag v{version} && git push origin v{version}, as the last step"
        )
    return problems


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def project_urls(repository: str) -> str:
    """The table of a pyproject.toml from which an installed package knows its repository; empty if that is unknown."""
    if not repository:
        return ""
    pages = {
        "Homepage": repository,
        "Documentation": f"{repository}/tree/main/docs",
        URL_NAME: repository,
        "Issues": f"{repository}/issues",
        "Changelog": f"{repository}/blob/main/CHANGELOG.md",
    }
    return "\n[project.urls]\n" + "".join(f'{name} = "{url}"\n' for name, url in pages.items())


def build_packages(folder: Path) -> None:
    """Build wheel and source distribution."""
    with tempfile.TemporaryDirectory(prefix="remuda-dist-") as temporary:
        source, built = Path(temporary, "source"), Path(temporary, "built")
        source.mkdir()
        for name in SOURCES:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
            else:
                shutil.copy(ROOT / name, source / name)
        with (source / "pyproject.toml").open("a", encoding="utf-8") as project:
            project.write(project_urls(fork.of_clone(ROOT)))
        for path in source.rglob("*"):
            path.chmod(bundles.PROGRAM_MODE if path.is_dir() else bundles.FILE_MODE)
        done = subprocess.run(
            [sys.executable, "-m", "build", "--sdist", "--wheel", "--outdir", str(built), str(source)],
            env={**os.environ, "SOURCE_DATE_EPOCH": str(EPOCH_S)},
            # setuptools writes the modes of its files into the wheel.
            umask=0o022,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            sys.exit(f"{done.stdout}{done.stderr}the wheel or the source distribution cannot be built")
        (wheel,) = built.glob("*.whl")
        shutil.copy(wheel, folder / wheel.name)
        # setuptools writes the time of the build into the source distribution.
        (archive,) = built.glob("*.tar.gz")
        with tarfile.open(archive) as content:
            files = {
                member.name: bundles.BundleFile(data=opened.read())
                for member in content
                if (opened := content.extractfile(member)) is not None
            }
        (folder / archive.name).write_bytes(bundles.tar_bundle(files))


def components(bundle: Path) -> list[dict[str, str]]:
    """Name, version and license of the packages in a Lambda bundle. All bundles have the same."""
    found = []
    with zipfile.ZipFile(bundle) as archive:
        for name in sorted(archive.namelist()):
            if name.endswith(".dist-info/METADATA"):
                metadata = email.parser.Parser().parsestr(archive.read(name).decode(), headersonly=True)
                terms = metadata["License-Expression"] or metadata["License"] or ""
                found.append(
                    {
                        "name": bundles.normalized(metadata["Name"]),
                        "version": metadata["Version"],
                        # Some packages have the whole text there.
                        "license": terms if "\n" not in terms else "",
                    }
                )
    return found


def write_sbom(folder: Path, python: Path) -> None:
    """Write the bill of materials with the virtualenv that has the CycloneDX library."""
    (bundle,) = folder.glob("remuda-lambda-*-x86_64.zip")
    document: dict[str, Any] = {"version": bundles.version(), "epoch": EPOCH_S, "components": components(bundle)}
    text = subprocess.run(
        [str(python), "-I", str(ROOT / "deploy" / "sbom.py")],
        input=json.dumps(document),
        text=True,
        check=True,
        stdout=subprocess.PIPE,
    ).stdout
    (folder / SBOM).write_text(text, encoding="utf-8")


def write_sums(folder: Path) -> str:
    lines = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n"
        for path in sorted(folder.iterdir())
        if path.name != SUMS
    ]
    text = "".join(lines)
    (folder / SUMS).write_text(text, encoding="utf-8")
    return text


def check_action_sums(sums: str, environment: Mapping[str, str], root: Path = ROOT) -> None:
    """Reject a tag whose action would refuse the bundles of the release."""
    known = root / ACTION_SUMS
    if tag_name(environment) and (not known.exists() or known.read_text(encoding="utf-8") != sums):
        sys.exit(f"{ACTION_SUMS} must be a copy of dist/{SUMS}; copy it, commit it and move the tag")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--to", type=Path, default=DIST, help="folder of the files; it is emptied first")
    parser.add_argument("--sbom-python", type=Path, default=ROOT / ".venv-lint" / "bin" / "python")
    parser.add_argument("--check", action="store_true", help="only check the version")
    parser.add_argument("--release-check", action="store_true", help="only say what is missing for a release")
    given = parser.parse_args(arguments)
    problems = version_problems(os.environ)
    if given.release_check:
        problems += release_problems()
        print("\n".join(f"to do: {problem}" for problem in problems) or "ready: the tag is set, push it")  # noqa: T201
        return 1 if problems else 0
    if problems:
        sys.exit("\n".join(problems))
    if given.check:
        return 0
    shutil.rmtree(given.to, ignore_errors=True)
    given.to.mkdir(parents=True)
    build_packages(given.to)
    for architecture in bundles.ARCHITECTURES:
        bundles.build(list(bundles.KINDS), architecture=architecture, folder=given.to)
    write_sbom(given.to, given.sbom_python)
    sums = write_sums(given.to)
    print(f"{given.to / SUMS}:\n{sums}", end="")  # noqa: T201
    check_action_sums(sums, os.environ)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
