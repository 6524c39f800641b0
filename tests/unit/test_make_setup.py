"""Every target of the Makefile installs what its programs import.

A program that imports a package of the tests fails in a fresh clone if its target installs the product alone.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
#: Folders in which programs find modules of this repository.
SOURCES = (ROOT, ROOT / "src", ROOT / "deploy")


def _requirements(file: str) -> Iterator[str]:
    lines = (ROOT / "requirements" / file).read_text(encoding="utf-8").splitlines()
    return (line for line in lines if line and line[0] not in "#-")


#: Marks of the environments in the Makefile, with what they install. The interpreter itself has neither.
PRODUCT = ("remuda[aws]",)
TOOLS = (*PRODUCT, *_requirements("dev.txt"))
ENVIRONMENTS = {"$(VENV)/.installed": PRODUCT, "$(VENV)/.tools": TOOLS}
_RULE = re.compile(r"^([a-z][a-z -]*):(?!=)([^#\n]*)(?:#[^\n]*)?\n((?:\t[^\n]*\n)+)", re.MULTILINE)
_PROGRAM = re.compile(r"\$\((BIN|PYTHON)\)(?:/python)? (?:-m ([a-z_.]+)|([a-z_/]+\.py))|\$\(BIN\)/(pytest) ([^\n]*)")
_FILE = re.compile(r"-r requirements/(\S+\.txt)")
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)(?:\[([a-z0-9,-]+)\])?")


@dataclass(frozen=True)
class Program:
    """A program that a target runs: the file, and the requirements that the target has installed before."""

    target: str
    file: Path
    requirements: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.target}: {self.file.relative_to(ROOT)}"


def programs() -> list[Program]:
    found = []
    for names, prerequisites, recipe in _RULE.findall((ROOT / "Makefile").read_text(encoding="utf-8")):
        given = {name for words in (prerequisites, recipe) for name in ENVIRONMENTS if name in words}
        extra = tuple(line for file in _FILE.findall(recipe) for line in _requirements(file))
        environment = TOOLS if "$(VENV)/.tools" in given else PRODUCT if given else ()
        for interpreter, module, script, pytest_name, arguments in _PROGRAM.findall(recipe):
            requirements = (*environment, *extra) if interpreter == "BIN" or pytest_name else ()
            files = [file for file in _files(module, script, arguments) if file is not None]
            found += [Program(names.split()[0], file, requirements) for file in files]
    return found


def _files(module: str, script: str, arguments: str) -> Iterator[Path | None]:
    if module:
        yield local_file(f"{module}.__main__") or local_file(module)
    elif script:
        yield ROOT / script
    else:
        yield from sorted(
            file
            for word in arguments.split()
            if word.startswith("tests/")
            for file in ([ROOT / word] if word.endswith(".py") else (ROOT / word).rglob("test_*.py"))
        )[:1]


@cache
def local_file(module: str) -> Path | None:
    """The file of a module of this repository."""
    for folder in SOURCES:
        path = folder / module.replace(".", "/")
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file
    return None


@cache
def imported(file: Path) -> frozenset[str]:
    """The modules that a file imports when it is loaded, not those of functions or for type checks."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return frozenset(_imports(tree.body))


def _imports(statements: list[ast.stmt]) -> Iterator[str]:
    for statement in statements:
        if isinstance(statement, ast.Import):
            yield from (name.name for name in statement.names)
        elif isinstance(statement, ast.ImportFrom) and statement.module:
            yield statement.module
            yield from (f"{statement.module}.{name.name}" for name in statement.names)
        elif isinstance(statement, ast.If) and "TYPE_CHECKING" not in ast.unparse(statement.test):
            yield from _imports([*statement.body, *statement.orelse])
        elif isinstance(statement, ast.With | ast.Try):
            yield from _imports(statement.body)


def foreign_packages(file: Path) -> dict[str, Path]:
    """The top-level packages from elsewhere that a program imports when it starts, each with a file that imports it."""
    found: dict[str, Path] = {}
    seen, waiting = {file}, [file]
    while waiting:
        current = waiting.pop()
        for module in imported(current):
            # A script also finds the modules beside it.
            top = module.partition(".")[0]
            beside = current.with_name(f"{top}.py")
            own = beside if beside.is_file() else local_file(module)
            parents = [local_file(module.rsplit(".", count)[0]) for count in range(1, module.count(".") + 1)]
            if own is None and not any(parents) and top not in sys.stdlib_module_names:
                found.setdefault(top, current)
            for each in (own, *parents):
                if each is not None and each not in seen:
                    seen.add(each)
                    waiting.append(each)
    return found


@cache
def distributions_of(requirements: tuple[str, ...]) -> frozenset[str]:
    """Names of the distributions that an installation of the requirements has."""
    found: set[str] = set()
    waiting = [_parse(text) for text in requirements]
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        name, extras = item = waiting.pop()
        if item in seen:
            continue
        seen.add(item)
        found.add(name)
        try:
            needed = requires(name) or []
        except PackageNotFoundError:
            continue
        for text in needed:
            marker = re.search(r"""extra == ["']([^"']+)["']""", text)
            if marker is None or marker[1] in extras:
                waiting.append(_parse(text))
    return frozenset(found)


def _parse(requirement: str) -> tuple[str, frozenset[str]]:
    match = _REQUIREMENT.match(requirement)
    assert match is not None, requirement
    return _normal(match[1]), frozenset(filter(None, (match[2] or "").split(",")))


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@cache
def distributions_by_package() -> Mapping[str, list[str]]:
    return packages_distributions()


@pytest.mark.parametrize("program", programs(), ids=str)
def test_a_target_installs_what_its_program_imports(program: Program) -> None:
    provided = distributions_of(program.requirements)
    missing = {
        package: f"{file.relative_to(ROOT)} imports it"
        for package, file in foreign_packages(program.file).items()
        if not {_normal(name) for name in distributions_by_package().get(package, [package])} & provided
    }
    assert not missing, f"make {program.target} fails in a fresh clone"


def test_the_programs_of_the_targets_are_found() -> None:
    found = {program.target for program in programs()}
    assert {"demo-aws", "acceptance", "chaos", "bench", "dist", "docs", "smoke-aws"} <= found
    assert {"pytest", "boto3"} & set(foreign_packages(ROOT / "tests/support/aws_demo.py"))


#: Targets that set themselves up, and why CI does not run them.
NOT_IN_CI = {"simulate": "it takes hours", "smoke-aws": "it needs an account", "terraform-test": "it needs Terraform"}


def targets_in_makefile() -> set[str]:
    """Targets that install an environment, without those that `make test` consists of."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    rules = {name: f"{before} {recipe}" for names, before, recipe in _RULE.findall(text) for name in names.split()}
    waiting, tested = ["test"], set()
    while waiting:
        name = waiting.pop()
        if name not in tested:
            tested.add(name)
            waiting += [other for other in rules if re.search(rf"(?<![\w/-]){other}(?![\w/-])", rules[name])]
    return {name for name, rule in rules.items() if "$(VENV)" in rule and name != "clean"} - tested


def test_ci_runs_every_target_in_a_fresh_clone() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    matrix = workflow["jobs"]["target"]["strategy"]["matrix"]
    run = {target.split()[0] for target in [*matrix["target"], *(item["target"] for item in matrix["include"])]}
    assert run | NOT_IN_CI.keys() == targets_in_makefile()
    assert not run & NOT_IN_CI.keys()
    assert workflow["jobs"]["test"]["steps"][-1]["run"] == "sudo make test"
