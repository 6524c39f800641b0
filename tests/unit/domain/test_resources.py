"""Resource classes, type patterns, run ids, scopes, and matching of messages."""

from __future__ import annotations

import fnmatch
import json
import re
import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remuda.domain.errors import UserError
from remuda.domain.resources import (
    DEFAULT_CLASSES,
    MAX_CLASSES,
    MAX_CPU,
    MAX_MEMORY_MIB,
    MAX_PATTERN_TEXT,
    Architecture,
    ResourceClass,
    Reuse,
    RunnerRequest,
    Tier,
    TypePatterns,
    UsageClass,
    check_run_id,
    check_scope,
    is_instance_id,
    mismatch,
    parse_classes,
)
from remuda.domain.serialization import from_document, to_document
from tests.support.records import message

#: Maximum characters of an error message.
MAX_MESSAGE = 300

# Type patterns ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("patterns", "matching", "others"),
    [
        ("*", ["c5.large", "", "anything"], []),
        ("c*", ["c5.large", "c"], ["m5.large", "xc5"]),
        ("m6i.large", ["m6i.large"], ["m6iXlarge", "m6i.large2", "am6i.large", "M6I.LARGE"]),
        ("c* m6i.large", ["c5.large", "m6i.large"], ["m6i.xlarge"]),
        ("c*,m*", ["c5", "m5"], ["r5"]),
        ("*.large", ["c5.large"], ["c5.xlarge", "c5.large.metal"]),
        ("c*.*large", ["c5.large", "c6i.12xlarge"], ["c5large", "m5.large"]),
        ("a*a", ["aa", "aba"], ["a", "ab"]),
        ("a*b*c", ["abc", "axbxc"], ["acb", "ac"]),
        ("ab*ba", ["abba", "abxba"], ["aba"]),
        ("**", ["", "x"], []),
    ],
)
def test_patterns_are_literal_except_for_the_star(patterns: str, matching: list[str], others: list[str]) -> None:
    parsed = TypePatterns.parse(patterns)
    assert [each for each in matching + others if parsed.matches(each)] == matching


@pytest.mark.parametrize(
    ("patterns", "architecture"),
    [
        ("c7g.*", Architecture.ARM64),
        ("c7g* im4gn.large", Architecture.ARM64),
        ("a1.large", Architecture.ARM64),
        ("g5.xlarge c7i.* c7i-flex.large", Architecture.X86_64),
        ("c7g.* c7i.*", None),
        ("c7*", None),
        ("c*", None),
        ("*", None),
        ("*.large", None),
        ("mac2.metal", None),
    ],
)
def test_architecture_of_patterns(patterns: str, architecture: Architecture | None) -> None:
    assert TypePatterns.parse(patterns).architecture is architecture


@given(st.text("ab.*-", min_size=1, max_size=12), st.text("ab.-", max_size=12))
def test_pattern_matches_like_fnmatch(pattern: str, text: str) -> None:
    assert TypePatterns.parse(pattern).matches(text) == fnmatch.fnmatchcase(text, pattern)


@pytest.mark.parametrize(
    "pattern",
    ["*a" * 32, "a*" * 32, "*" * 64, "*a*b" * 16, "a*" * 31 + "b", "*" + "a" * 62 + "b"],
    ids=["star a", "a star", "stars", "two letters", "no end", "long tail"],
)
@pytest.mark.parametrize("text", ["a" * 1_000, "ab" * 500, "a" * 999 + "c"], ids=["aaa", "abab", "aaac"])
def test_no_pattern_is_slow(pattern: str, text: str) -> None:
    words = " ".join(pattern[:64] for _ in range(MAX_PATTERN_TEXT // 65))
    parsed = TypePatterns.parse(words)
    started = time.perf_counter()
    for _ in range(100):
        parsed.matches(text)
    assert time.perf_counter() - started < 1.0


@pytest.mark.parametrize(
    "text", ["", "   ", ",,", "c5.large;rm", "c?", "[a-z]", "c5\u00e9", "$(x)", "a" * 65, "c5/large", "x" * 10_000]
)
def test_invalid_pattern_is_rejected_in_one_short_sentence(text: str) -> None:
    with pytest.raises(UserError) as refused:
        TypePatterns.parse(text)
    assert refused.value.field == "allowed-instance-types"
    assert "c* m6i.large" in refused.value.fix
    assert len(refused.value.message) < MAX_MESSAGE
    assert "\n" not in refused.value.message


def test_duplicate_patterns_are_removed_in_order() -> None:
    assert str(TypePatterns.parse("m* c*, m*")) == "m* c*"


# Classes ----------------------------------------------------------------------------------------------------------


def test_custom_classes_replace_the_defaults() -> None:
    parsed = parse_classes({"small": {"cpu": 1, "mmem": 512}, "gpu_1-x": {"cpu": MAX_CPU, "mmem": MAX_MEMORY_MIB}})
    assert parsed == (
        ResourceClass(name="small", cpu=1, memory_mib=512),
        ResourceClass(name="gpu_1-x", cpu=MAX_CPU, memory_mib=MAX_MEMORY_MIB),
    )


def test_class_has_its_own_types_image_architecture_and_gpus() -> None:
    written = {
        "cpu": 4,
        "mmem": 8192,
        "max-cpu": 16,
        "gpu": 1,
        "instance-types": "g5g.*",
        "ami": "ami-0123456789abcdef0",
        "architecture": "arm64",
    }
    (parsed,) = parse_classes({"gpu": written})
    assert parsed == ResourceClass(
        name="gpu",
        cpu=4,
        memory_mib=8192,
        max_cpu=16,
        gpu=1,
        types=TypePatterns(("g5g.*",)),
        ami="ami-0123456789abcdef0",
        architecture=Architecture.ARM64,
    )
    assert parsed.describe() == written
    assert from_document(ResourceClass, json.loads(json.dumps(to_document(parsed)))) == parsed


@pytest.mark.parametrize(("given", "largest"), [({}, 64), ({"max-cpu": 8}, 8), ({"cpu": 96}, 96)])
def test_class_has_a_maximum_size(given: dict[str, int], largest: int) -> None:
    (parsed,) = parse_classes({"a": {"cpu": 2, "mmem": 4096, **given}})
    assert parsed.largest_cpu == largest


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"max-cpu": 1}, "max-cpu of 'a' is 1"),
        ({"gpu": -1}, "gpu of 'a' is -1"),
        ({"gpu": {"count": 1}}, "gpu of 'a'"),
        ({"ami": "ubuntu"}, "ami of 'a' is 'ubuntu'"),
        ({"ami": 5}, "ami of 'a' is"),
        ({"architecture": "arm"}, "architecture of 'a' is 'arm'"),
        ({"architecture": ["arm64"]}, "architecture of 'a'"),
        ({"instance-types": ""}, "instance-types of 'a' is empty"),
        ({"instance-types": ["c7g.*"]}, "instance-types of 'a'"),
        ({"instance-types": "c7g.large;"}, "'c7g.large;' is not a type pattern"),
        ({"instance_types": "c7g.*"}, "unknown field 'instance_types'"),
    ],
)
def test_invalid_field_of_a_class_is_named(changed: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=re.escape(named)) as refused:
        parse_classes({"a": {"cpu": 2, "mmem": 4096, **changed}})
    assert refused.value.fix


@pytest.mark.parametrize(
    ("one", "other", "both"),
    [
        ("*", "c*", "c*"),
        ("c7g.* m7g.*", "*", "c7g.* m7g.*"),
        ("c*", "*.large", "c*.large"),
        ("c7g.* m7g.*", "c*", "c7g.*"),
        ("c7g.* m7g.*", "*.xlarge m7g.large", "c7g.xlarge m7g.large m7g.xlarge"),
        ("g5.xlarge", "g*.xlarge", "g5.xlarge"),
        ("g5.*", "c*", ""),
        ("m*.*xlarge", "m6i.2*", "m6i.2*xlarge"),
        ("c7*", "c7g.large", "c7g.large"),
        ("* c5.large", "c*", "c*"),
    ],
)
def test_patterns_narrow_each_other(one: str, other: str, both: str) -> None:
    first, second = TypePatterns.parse(one), TypePatterns.parse(other)
    assert set(first.narrowed(second).words) == set(second.narrowed(first).words) == set(both.split())


TYPE_PATTERNS = st.from_regex(r"[cm]?\*?(7g)?(\.(\*|2?\*?(x?large)?))?", fullmatch=True).filter(bool)


@given(TYPE_PATTERNS, TYPE_PATTERNS)
def test_narrowed_patterns_match_no_other_types(one: str, other: str) -> None:
    first, second = TypePatterns((one,)), TypePatterns((other,))
    for name in (f"{family}.{size}" for family in ("c7g", "m7g", "c", "m") for size in ("large", "xlarge", "2xlarge")):
        if first.narrowed(second).matches(name):
            assert first.matches(name)
            assert second.matches(name)


def test_default_classes_have_the_size_of_compute_optimized_instances() -> None:
    for each in DEFAULT_CLASSES:
        multiple = each.name.removesuffix("large")
        cpu = 2 if not multiple else 4 * int(multiple.removesuffix("x") or 1)
        assert (each.cpu, each.memory_mib) == (cpu, cpu * 2 * 1_024)


def test_default_classes_can_be_written_as_a_document() -> None:
    document = {each.name: {"cpu": each.cpu, "mmem": each.memory_mib} for each in DEFAULT_CLASSES}
    assert parse_classes(json.loads(json.dumps(document))) == DEFAULT_CLASSES


@pytest.mark.parametrize(
    "document",
    [
        None,
        {},
        [],
        "large",
        5,
        {"large": None},
        {"large": [2, 4096]},
        {"large": {}},
        {"large": {"cpu": 2}},
        {"large": {"mmem": 2}},
        {"large": {"cpu": "2", "mmem": 4096}},
        {"large": {"cpu": 2.0, "mmem": 4096}},
        {"large": {"cpu": True, "mmem": 4096}},
        {"large": {"cpu": 0, "mmem": 4096}},
        {"large": {"cpu": -1, "mmem": 4096}},
        {"large": {"cpu": MAX_CPU + 1, "mmem": 4096}},
        {"large": {"cpu": 2, "mmem": MAX_MEMORY_MIB + 1}},
        {"large": {"cpu": float("nan"), "mmem": 4096}},
        {"large": {"cpu": "9" * 10_000, "mmem": 4096}},
        {"": {"cpu": 2, "mmem": 4096}},
        {"two words": {"cpu": 2, "mmem": 4096}},
        {"a,b": {"cpu": 2, "mmem": 4096}},
        {"x" * 10_000: {"cpu": 2, "mmem": 4096}},
        {"-x": {"cpu": 2, "mmem": 4096}},
        {5: {"cpu": 2, "mmem": 4096}},
        {f"c{number}": {"cpu": 2, "mmem": 4096} for number in range(MAX_CLASSES + 1)},
    ],
    ids=lambda value: repr(value)[:40],
)
def test_malformed_classes_are_rejected_in_one_short_sentence(document: Any) -> None:
    with pytest.raises(UserError) as refused:
        parse_classes(document)
    assert refused.value.field == "resource-class-config"
    assert refused.value.fix
    assert len(refused.value.message) < MAX_MESSAGE


# Matching ---------------------------------------------------------------------------------------------------------

WANTED = RunnerRequest(
    resource_class=ResourceClass(name="large", cpu=2, memory_mib=4_096),
    usage_class=UsageClass.SPOT,
    patterns=TypePatterns.parse("c*"),
    tier=Tier.TRUSTED,
)


def test_message_with_more_resources_matches() -> None:
    assert mismatch(message(), WANTED) is None
    assert mismatch(message(cpu=64, memory_mib=99_999), WANTED) is None


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"resource_class": "xlarge"}, "class xlarge, not large"),
        ({"usage_class": UsageClass.ON_DEMAND}, "on-demand, not spot"),
        ({"instance_type": "m6i.large"}, "type m6i.large is not among c*"),
        ({"cpu": 1}, "1 cpu, 2 wanted"),
        ({"memory_mib": 4_095}, "4095 MiB, 4096 wanted"),
        ({"tier": Tier.UNTRUSTED}, "tier untrusted, not trusted"),
    ],
)
def test_one_difference_is_a_mismatch_with_its_reason(changed: dict[str, Any], why: str) -> None:
    assert mismatch(message(**changed), WANTED) == why


def test_trusted_instance_does_not_match_an_untrusted_run() -> None:
    assert mismatch(message(), replace(WANTED, tier=Tier.UNTRUSTED)) is not None


@pytest.mark.parametrize(
    ("reuse", "tier", "admitted"),
    [
        (Reuse.ALWAYS, Tier.TRUSTED, (Tier.TRUSTED,)),
        (Reuse.ALWAYS, Tier.UNTRUSTED, (Tier.TRUSTED, Tier.UNTRUSTED)),
        (Reuse.SAME_TRUST, Tier.TRUSTED, (Tier.TRUSTED,)),
        (Reuse.SAME_TRUST, Tier.UNTRUSTED, (Tier.UNTRUSTED,)),
        (Reuse.SAME_REPO, Tier.UNTRUSTED, (Tier.UNTRUSTED,)),
        (Reuse.NEVER, Tier.TRUSTED, ()),
        (Reuse.NEVER, Tier.UNTRUSTED, ()),
    ],
)
def test_tiers_that_a_run_may_claim(reuse: Reuse, tier: Tier, admitted: tuple[Tier, ...]) -> None:
    assert reuse.tiers(tier) == admitted


def test_instance_of_another_repository_does_not_match_with_same_repo() -> None:
    wanted = replace(WANTED, reuse=Reuse.SAME_REPO, repository="octo/one")
    assert mismatch(message(repository="octo/one"), wanted) is None
    assert mismatch(message(repository="octo/two"), wanted) == "served octo/two, not octo/one alone"
    assert mismatch(message(), wanted) == "served more than one repository, not octo/one alone"
    assert mismatch(message(repository="octo/two"), WANTED) is None


@pytest.mark.parametrize("text", ["octo", "octo/", "a b/c", "octo/r\n", "octo/r/s", "x" * 300])
def test_repository_of_a_message_is_valid_or_empty(text: str) -> None:
    with pytest.raises(ValueError, match="repository"):
        message(repository=text)


# Ids --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["i-01234567", "i-0123456789abcdef0"])
def test_instance_ids(text: str) -> None:
    assert is_instance_id(text)
    assert message().id == "i-00000000000000001"


@pytest.mark.parametrize(
    "text", ["", "i-", "i-0123456", "i-0123456789abcdef01", "I-01234567", "i-0123456G", "i-01234567\n"]
)
def test_message_rejects_an_invalid_instance_id(text: str) -> None:
    assert not is_instance_id(text)
    with pytest.raises(ValueError, match="not an instance id"):
        message(id=text)


@pytest.mark.parametrize("epoch", [0, -1])
def test_message_rejects_an_epoch_below_1(epoch: int) -> None:
    with pytest.raises(ValueError, match="below 1"):
        message(epoch=epoch)


@pytest.mark.parametrize("text", ["1", "16823234567", "run.1_a-b", "A" * 64])
def test_run_ids(text: str) -> None:
    assert check_run_id(text) == text


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "1 2", "1,2", "1\n", "-1", ".1", "a/b", "é", "A" * 65, "x" * 10_000, "$(id)"),
        *("self-hosted", "Self-Hosted", "linux", "X64", "ARM64", "windows", "macOS"),
    ],
)
def test_run_id_is_one_word_and_not_a_default_label(text: str) -> None:
    with pytest.raises(UserError) as refused:
        check_run_id(text)
    assert (refused.value.field, "github.run_id" in refused.value.fix) == ("run-id", True)
    assert len(refused.value.message) < MAX_MESSAGE


@pytest.mark.parametrize("text", ["octo", "octo/repo", "o-c-t-o/my.repo_1-x", "octo/.github"])
def test_scopes(text: str) -> None:
    assert check_scope(text) == text


@pytest.mark.parametrize(
    "text", ["", "/", "octo/", "/repo", "octo/repo/x", "oc to", "octo/re po", "octo/..", "octo/.", "-octo", "x" * 9_999]
)
def test_scope_is_an_owner_or_a_repository(text: str) -> None:
    with pytest.raises(UserError) as refused:
        check_scope(text)
    assert refused.value.field == "github-scope"
    assert len(refused.value.message) < MAX_MESSAGE
