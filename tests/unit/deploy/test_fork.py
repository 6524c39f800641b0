"""The address of a fork: found in git remotes and packages, and written into everything that names it."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

import fork
import release
from remuda import source_repository
from remuda.source_repository import UNKNOWN_REPOSITORY, address_of_remote, documentation, find_source_repository

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("remote", "address"),
    [
        ("git@github.com:acme/remuda.git", "https://github.com/acme/remuda"),
        ("https://github.com/acme/remuda", "https://github.com/acme/remuda"),
        ("https://github.com/acme/remuda.git/", "https://github.com/acme/remuda"),
        ("https://x-access-token:ghs_secret@github.com/acme/remuda.git", "https://github.com/acme/remuda"),
        ("ssh://git@git.acme.example:2222/tools/remuda.git", "https://git.acme.example/tools/remuda"),
        ("org-1234@github.com:acme/my.remuda.git", "https://github.com/acme/my.remuda"),
        ("/srv/git/remuda.git", ""),
        ("../remuda", ""),
        ("file:///srv/acme/remuda", ""),
        ("https://github.com/YOUR_ORG/remuda", ""),
        ("git@github.com:acme/remuda.git\nx", ""),
        ("", ""),
    ],
)
def test_the_address_of_a_remote_has_no_credential(remote: str, address: str) -> None:
    assert address_of_remote(remote) == address


def clone(folder: Path, remote: str) -> Path:
    folder.mkdir(parents=True)
    for command in (("init", "-q"), ("remote", "add", "origin", remote)):
        subprocess.run(["git", *command], cwd=folder, check=True)
    return folder


def test_a_clone_knows_its_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_repository, "_of_package", lambda: "")
    folder = clone(tmp_path / "clone", "git@github.com:acme/remuda.git")
    assert find_source_repository(folder) == "https://github.com/acme/remuda"
    # The repository of a project with a virtualenv is not that of Remuda.
    (folder / ".venv" / "lib").mkdir(parents=True)
    assert find_source_repository(folder / ".venv" / "lib") == ""
    monkeypatch.setattr(source_repository, "_of_package", lambda: "https://github.com/built/remuda")
    assert find_source_repository(folder / ".venv") == "https://github.com/built/remuda"


def test_an_installed_package_knows_its_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    built = tomllib.loads(release.project_urls("https://github.com/acme/remuda"))["project"]["urls"]
    assert {"Homepage", "Documentation", "Source", "Issues", "Changelog"} == set(built)

    class Metadata:
        def get_all(self, name: str) -> list[str]:
            assert name == "Project-URL"
            return [f"{name}, {url}" for name, url in built.items()]

    monkeypatch.setattr(source_repository, "metadata", lambda _: Metadata())
    assert source_repository._of_package() == "https://github.com/acme/remuda"
    assert release.project_urls("") == ""


def test_links_are_addresses_only_if_the_repository_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    page = "docs/reference/commands.md#run-workflow"
    for address, expected in (("", page), ("https://g.example/a/b", f"https://g.example/a/b/blob/main/{page}")):
        monkeypatch.setattr(source_repository, "find_source_repository", lambda address=address: address)
        assert documentation(page) == expected
    assert (ROOT / page.partition("#")[0]).is_file()


def test_the_address_is_written_everywhere_and_again(tmp_path: Path) -> None:
    root = clone(tmp_path / "clone", "https://github.com/acme/remuda.git")
    files = {
        "deploy/repository.txt": f"{UNKNOWN_REPOSITORY}\n",
        "ci.yml": f"uses: {UNKNOWN_REPOSITORY}@v0.1.0\nuses: other/remuda-tools@v1\n",
        "docs/howto/your-own-fork.md": f"files name {UNKNOWN_REPOSITORY}\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    subprocess.run(["git", "add", "."], cwd=root, check=True)
    assert fork.write_address("acme/remuda", root) == [root / "ci.yml"]
    assert (root / "ci.yml").read_text() == "uses: acme/remuda@v0.1.0\nuses: other/remuda-tools@v1\n"
    assert (root / "docs/howto/your-own-fork.md").read_text() == files["docs/howto/your-own-fork.md"]
    # A merge brings files of the repository that was forked.
    (root / "new.yml").write_text(f"uses: {UNKNOWN_REPOSITORY}@v0.2.0\nuses: acme/remuda-other@v1\n")
    subprocess.run(["git", "add", "."], cwd=root, check=True)
    fork.write_address("jane/remuda", root)
    assert (root / "ci.yml").read_text().startswith("uses: jane/remuda@v0.1.0\n")
    assert (root / "new.yml").read_text() == "uses: jane/remuda@v0.2.0\nuses: acme/remuda-other@v1\n"
    assert fork.recorded(root) == "jane/remuda"


def test_all_workflows_name_the_recorded_address() -> None:
    pages = [*ROOT.glob("deploy/**/*.yml"), *ROOT.glob("docs/**/*.md"), ROOT / "README.md"]
    named = {name for page in pages for name in re.findall(r"uses: (\S+/remuda)@", page.read_text(encoding="utf-8"))}
    assert named == {fork.recorded()}


@pytest.mark.parametrize("page", [*sorted(ROOT.glob("docs/**/*.md")), ROOT / "README.md"], ids=lambda page: page.name)
def test_no_command_has_a_placeholder_for_the_repository(page: Path) -> None:
    blocks = re.findall(
        r"^ *```(?:sh|console)\n(.*?)^ *```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    for block in blocks:
        assert "your-org" not in block.lower().replace("_", "-"), block
