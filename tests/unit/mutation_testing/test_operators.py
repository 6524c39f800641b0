"""Mutation operators: which changes are made, and which code is left alone."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from mutation_testing import operators
from mutation_testing.operators import GeneratedMutant, mutants_of, read_signatures, sample
from simulation.mutation import mutated_tree

FUNCTION = '''
def f(a, b, items=(1, 2), *, wait=True):
    """Compare 1 < 2."""
    {}
'''


def mutants(folder: Path, source: str) -> list[GeneratedMutant]:
    file = folder / "remuda" / "domain" / "sample.py"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(source, encoding="utf-8")
    return mutants_of(file, read_signatures([file]), folder)


def changes(folder: Path, statement: str) -> set[tuple[str, str]]:
    found = mutants(folder, FUNCTION.format(statement))
    return {(mutant.operator, mutant.replacement.new) for mutant in found}


@pytest.mark.parametrize(
    ("statement", "operator", "new"),
    [
        ("x = a < b", "boundary", "a <= b"),
        ("x = a < b", "negate comparison", "a >= b"),
        ("x = 0 <= a < b", "boundary", "0 <= a <= b"),
        ("x = a and b", "and/or", "a or b"),
        ("x = a and b", "remove operand", "b"),
        ("x = not a", "remove not", "a"),
        ("x = a + b", "arithmetic", "a - b"),
        ("x = 5", "constant + 1", "6"),
        ("x = 5", "constant - 1", "4"),
        ("x = True", "boolean", "False"),
        ("x = [a]", "empty collection", "[]"),
        ("x = {a: b}", "empty collection", "{}"),
        ("x = max(a, b)", "other function", "min(a, b)"),
        ("x = [i for i in b if i]", "negate condition", "not i"),
        ("a.stop()", "remove statement", ""),
        ("a.x = b", "remove statement", ""),
        ("return b", "return None", "return None"),
        ("f(a, b, wait=False)", "remove argument", ""),
    ],
)
def test_each_operator_changes_its_code(tmp_path: Path, statement: str, operator: str, new: str):
    assert (operator, new) in changes(tmp_path, statement)


@pytest.mark.parametrize(
    "statement",
    [
        "log.info(a < b)",
        "raise ValueError(a < b)",
        "assert a < b",
        "x = f'{a < b}'",
        "x: int",
        "if TYPE_CHECKING: a.stop()",
        "return None",
        "return",
    ],
)
def test_texts_assertions_and_types_are_left_alone(tmp_path: Path, statement: str):
    assert changes(tmp_path, statement) == set()


def test_arguments_without_a_default_are_not_removed(tmp_path: Path):
    assert ("remove argument", "") not in changes(tmp_path, "f(a, b=b)")


def test_only_arguments_of_the_same_type_are_swapped(tmp_path: Path):
    source = "def f(a: int, b: int): ...\ndef g(a: int, b: str): ...\nx = f(1, 2)\ny = g(1, '')\n"
    swapped = [item.replacement.new for item in mutants(tmp_path, source) if item.operator == "swap arguments"]
    assert swapped == ["f(2, 1)"]


def test_code_outside_functions_is_changed_there_only(tmp_path: Path):
    source = "def f():\n    return 5\nclass A:\n    limit = 5\nLIMIT = 5\n"
    outside = [
        item for item in mutants(tmp_path, source) if item.operator == "constant + 1" and not item.is_in_function
    ]
    changed = [ast.unparse(mutated_tree(source, [item.located()])) for item in outside]
    assert [item.first_line for item in outside] == [4, 5]
    assert [text.split().count("6") for text in changed] == [1, 1]
    assert "limit = 6" in changed[0]
    assert "LIMIT = 6" in changed[1]


def test_equal_code_in_one_function_gives_different_mutants(tmp_path: Path):
    source = "def f(a):\n    x = a < 1\n    y = a < 1 or a < 1\n"
    found = [item for item in mutants(tmp_path, source) if item.operator == "boundary"]
    assert len({item.id for item in found}) == 3
    assert sorted(item.located().number or 0 for item in found) == [0, 1, 2]


def test_ids_do_not_depend_on_other_functions(tmp_path: Path):
    source = "def f(a):\n    return a < 1\n"
    before = {item.id for item in mutants(tmp_path, source)}
    after = {item.id for item in mutants(tmp_path, f"def g(a):\n    return a < 1\n\n\n{source}")}
    assert before < after


def test_a_sample_is_reproducible_and_differs_by_seed(tmp_path: Path):
    found = mutants(tmp_path, "".join(f"def f{number}(a):\n    return a < {number}\n" for number in range(50)))
    chosen = sample(found, 10, 1)
    assert [item.id for item in chosen] == [item.id for item in sample([*reversed(found)], 10, 1)]
    assert {item.id for item in chosen} != {item.id for item in sample(found, 10, 2)}
    assert len(chosen) == 10


def test_mentions_of_a_constant_include_those_of_constants_computed_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(operators, "SOURCES", (tmp_path,))
    found = mutants(tmp_path, "FIRST = 5\nSECOND = FIRST * 2\n\n\ndef f():\n    return SECOND\n")
    (mutant,) = (item for item in found if item.operator == "constant + 1" and item.first_line == 1)
    assert {lines.start for _, lines in mutant.mentions()} == {1, 2, 6}
