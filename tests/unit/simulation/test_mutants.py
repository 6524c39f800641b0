"""Mutants: the code that each one replaces must exist exactly once."""

from __future__ import annotations

import ast

import pytest

from simulation.mutants import MAX_MUTANTS, MUTANTS, BugClass, argument, entry, expression, statements
from simulation.mutation import MutationError, Replacement, check, mutated_tree


def test_each_class_has_mutants_and_none_is_there_twice():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) <= MAX_MUTANTS
    assert {mutant.kind for mutant in MUTANTS} == set(BugClass)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_replaced_code_exists_and_the_result_compiles(mutant):
    check(mutant.replacements)
    assert mutant.replacements


SOURCE = '''
class Pool:
    def take(self, count):
        """Take some."""
        if count > 1:  # a comment
            return self.many(count, wait=True)
        limits = {"a": 1, "b": 2}
        return [item for item in self.items if item.free]
'''


def mutated(*replacements: Replacement) -> str:
    return ast.unparse(mutated_tree(SOURCE, replacements))


def test_expressions_statements_and_arguments_are_replaced():
    assert "if count > 2:" in mutated(expression("m", "Pool.take", "count>1", "count > 2"))
    assert "wait" not in mutated(argument("m", "Pool.take", "wait=...", ""))
    assert "if count" not in mutated(statements("m", "Pool.take", "if count > 1:\n    ...", ""))
    assert "{'a': 1, 'b': 3}" in mutated(entry("m", "Pool.take", "'b': 2", "'b': 3"))
    assert "return self.items" in mutated(statements("m", "Pool.take", "return self.many(...)", "return self.items"))


def test_a_body_that_loses_its_only_statement_passes():
    assert "pass" in mutated(statements("m", "Pool.take", "return self.many(...)", ""))


@pytest.mark.parametrize(
    "replacement",
    [
        expression("m", "Pool.give", "count > 1", "True"),
        expression("m", "Pool.take", "count > 3", "True"),
        expression("m", "Pool.take", "count", "1"),
        argument("m", "Pool.take", "wait=False", ""),
    ],
    ids=["no function", "no match", "several matches", "other value"],
)
def test_a_replacement_that_does_not_fit_is_an_error(replacement: Replacement):
    with pytest.raises(MutationError):
        mutated(replacement)


@pytest.mark.parametrize("new", ["unheard_of", "record.unheard_of", "f(unheard_of=record)"])
def test_new_code_may_not_use_unknown_names(new: str):
    old = "record.epoch == self.epoch"
    with pytest.raises(MutationError, match="unheard_of"):
        check([expression("remuda.domain.transitions.apply", "WriteCondition.is_met_by", old, new)])
