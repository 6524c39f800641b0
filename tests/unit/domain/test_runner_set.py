"""Runner sets: parsing, contradictions between sets, labels, capacity windows."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest

from remuda.cli.rendering.results import config_rows, config_table
from remuda.config.settings import time_zone
from remuda.config.sources import load
from remuda.domain.errors import UserError
from remuda.domain.resources import Reuse, Tier, UsageClass
from remuda.domain.runner_set import (
    EXAMPLE,
    MAX_GROUP,
    CapacityWindow,
    RunnerSet,
    capacity_warnings,
    check_fits_pool,
    parse_runner_sets,
)

SCOPE = "acme/app"
LARGE = {"name": "large", "labels": ["self-hosted", "remuda", "large"], "max": 20}


def parse(*documents: Any, scope: str = SCOPE) -> tuple[RunnerSet, ...]:
    return parse_runner_sets(list(documents), default_scope=scope, zone_of=time_zone)


def refuse(*documents: Any, scope: str = SCOPE) -> UserError:
    with pytest.raises(UserError) as refused:
        parse(*documents, scope=scope)
    error = refused.value
    assert error.field == "runner-sets"
    assert error.fix
    assert "\n" not in error.message
    assert len(error.message) < 300
    return error


# Parsing ------------------------------------------------------------------------------------------------------------


def test_defaults() -> None:
    assert parse(LARGE) == (
        RunnerSet(name="large", labels=("self-hosted", "remuda", "large"), resource_class="large", scope=SCOPE, max=20),
    )


def test_every_field() -> None:
    document = {
        "name": "forks",
        "labels": ["self-hosted", "forks"],
        "resource-class": "2xlarge",
        "usage-class": "spot",
        "allowed-instance-types": "c7* m6i.large",
        "scope": "acme",
        "runner-group": "public",
        "max": 5,
        "trust": "untrusted",
        "strict": True,
        "rerun-on-interruption": True,
        "windows": [{"cron": "* 9-17 * * 1-5", "time-zone": "Europe/Berlin", "hot": 1, "warm": 2}],
    }
    (parsed,) = parse(document)
    assert parsed == RunnerSet(
        name="forks",
        labels=("self-hosted", "forks"),
        resource_class="2xlarge",
        usage_class=UsageClass.SPOT,
        allowed_instance_types="c7* m6i.large",
        scope="acme",
        runner_group="public",
        max=5,
        trust=Tier.UNTRUSTED,
        strict=True,
        rerun_on_interruption=True,
        windows=(CapacityWindow(cron="* 9-17 * * 1-5", time_zone="Europe/Berlin", hot=1, warm=2),),
    )
    assert parsed.describe() == (
        "labels self-hosted forks, up to 5 spot 2xlarge of c7* m6i.large, for acme in group public, untrusted, "
        "re-runs interrupted jobs, window '* 9-17 * * 1-5' Europe/Berlin: 1 hot, 2 warm"
    )


def test_labels_are_distinct_in_any_letter_case() -> None:
    (parsed,) = parse({**LARGE, "labels": ["Remuda", "remuda", "large"]})
    assert parsed.labels == ("Remuda", "large")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"name": ""}, "runner-sets[0]: name is ''"),
        ({"name": "a b"}, "runner-sets[0]: name is 'a b'"),
        ({"name": "x" * 41}, "runner-sets[0]: name is 'xxxx"),
        ({"name": 5}, "runner-sets[0]: name is 5"),
        ({"labels": []}, "runner-sets[0]: labels is []"),
        ({"labels": "large"}, "runner-sets[0]: labels is 'large'"),
        ({"labels": ["a,b"]}, "runner-sets[0]: labels[0] is 'a,b'"),
        ({"labels": ["a", ""]}, "runner-sets[0]: labels[1] is ''"),
        ({"labels": ["a", 5]}, "runner-sets[0]: labels[1] is 5"),
        ({"labels": ["a\x1b[2J"]}, "runner-sets[0]: labels[0] is "),
        ({"labels": [str(number) for number in range(21)]}, "runner-sets[0]: labels is "),
        ({"resource-class": 5}, "runner-sets[0]: resource-class is 5"),
        ({"usage-class": "cheap"}, "runner-sets[0]: usage-class is 'cheap'"),
        ({"usage-class": []}, "runner-sets[0]: usage-class is []"),
        ({"scope": "a/b/c"}, "runner-sets[0]: scope is 'a/b/c'"),
        ({"scope": "acme", "runner-group": "x" * 65}, "runner-sets[0]: runner-group is 'xxx"),
        ({"max": 0}, "runner-sets[0]: max is 0"),
        ({"max": 1_001}, "runner-sets[0]: max is 1001"),
        ({"max": True}, "runner-sets[0]: max is True"),
        ({"max": "5"}, "runner-sets[0]: max is '5'"),
        ({"max": None}, "runner-sets[0]: max is missing"),
        ({"trust": "none"}, "runner-sets[0]: trust is 'none'"),
        ({"strict": "yes"}, "runner-sets[0]: strict is 'yes'"),
        ({"rerun-on-interruption": 1}, "runner-sets[0]: rerun-on-interruption is 1"),
        ({"maximum": 5}, "runner-sets[0] has an unknown key 'maximum'"),
        ({"windows": {}}, "runner-sets[0]: windows is {}"),
        ({"windows": [5]}, "runner-sets[0]: windows[0] is 5"),
        ({"windows": [{"idle": 5}]}, "runner-sets[0]: windows[0] has an unknown key 'idle'"),
        ({"windows": [{"cron": "* *"}]}, "runner-sets[0]: windows[0]: cron is '* *'"),
        ({"windows": [{"cron": 5}]}, "runner-sets[0]: windows[0]: cron is 5"),
        ({"windows": [{"time-zone": "Mars/Base"}]}, "runner-sets[0]: windows[0]: time-zone is 'Mars/Base'"),
        ({"windows": [{"time-zone": 5}]}, "runner-sets[0]: windows[0]: time-zone is 5"),
        ({"windows": [{"hot": -1}]}, "runner-sets[0]: windows[0]: hot is -1"),
        ({"windows": [{"warm": 1.5}]}, "runner-sets[0]: windows[0]: warm is 1.5"),
        ({"windows": [{}, {"hot": 21}]}, "runner-sets[0]: windows[1]: hot is 21"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_invalid_value_is_named_with_its_field(changed: dict[str, Any], said: str) -> None:
    assert refuse({**LARGE, **changed}).message.startswith(said)


@pytest.mark.parametrize("missing", ["name", "labels", "max"])
def test_required_fields(missing: str) -> None:
    document = {name: value for name, value in LARGE.items() if name != missing}
    assert refuse(document).message == f"runner-sets[0]: {missing} is missing"


def test_invalid_instance_types_are_rejected() -> None:
    with pytest.raises(UserError, match=r"runner-sets\[0\]: allowed-instance-types"):
        parse({**LARGE, "allowed-instance-types": "c7; rm"})


@pytest.mark.parametrize("document", [{}, "large", None, 5, [LARGE] * 51])
def test_other_documents_are_rejected(document: Any) -> None:
    with pytest.raises(UserError, match="must be a list of up to 50 sets"):
        parse_runner_sets(document, default_scope=SCOPE, zone_of=time_zone)


# Contradictions -----------------------------------------------------------------------------------------------------


def test_name_in_another_letter_case_is_the_same_set() -> None:
    """GitHub would find the set of one name by the other, and the listener would delete it as removed."""
    document = {**LARGE, "resource-class": "large"}
    assert parse({**document, "name": "Large"}) == parse(document)


def test_names_are_unique_in_any_letter_case() -> None:
    error = refuse(LARGE, {**LARGE, "name": "LARGE", "labels": ["other"]})
    assert error.message == "runner-sets: two sets are named 'large'"


@pytest.mark.parametrize(
    ("one", "other", "is_refused"),
    [
        (SCOPE, SCOPE, True),
        (SCOPE, "ACME/App", True),
        ("acme", SCOPE, True),
        (SCOPE, "acme", True),
        (SCOPE, "acme/other", False),
        ("acme", "acmeinc/app", False),
    ],
)
def test_labels_that_include_those_of_another_set_are_rejected_if_scopes_overlap(
    one: str,
    other: str,
    is_refused: bool,  # noqa: FBT001
) -> None:
    narrow = {"name": "narrow", "labels": ["remuda"], "max": 1, "resource-class": "large", "scope": one}
    wide = {"name": "wide", "labels": ["Remuda", "gpu"], "max": 1, "resource-class": "large", "scope": other}
    if not is_refused:
        assert len(parse(narrow, wide)) == 2
        return
    for order in ((narrow, wide), (wide, narrow)):
        error = refuse(*order)
        assert "labels of 'wide' include those of 'narrow'" in error.message
        assert error.fix == "give each set a label that the other has not"


def test_overlap_is_found_if_one_scope_is_that_of_the_pool() -> None:
    """The settings are parsed before the scope of the pool is known."""
    text = json.dumps([LARGE, {**LARGE, "name": "other", "scope": SCOPE}])
    with pytest.raises(UserError, match="include those of") as refused:
        load({"runner_sets": text, "github_scope": SCOPE}, environ={})
    assert refused.value.field == "--runner-sets"
    assert len(load({"runner_sets": text, "github_scope": "acme/else"}, environ={}).runner_sets) == 2


def test_sets_with_a_label_of_their_own_may_share_others() -> None:
    assert len(parse(LARGE, {**LARGE, "name": "small", "labels": ["self-hosted", "remuda", "small"]})) == 2


def test_runner_group_needs_an_organization() -> None:
    error = refuse({**LARGE, "runner-group": "warm"})
    assert (
        error.message == "runner-sets: runner-group of 'large' is 'warm', but acme/app is a repository without groups"
    )
    assert parse({**LARGE, "runner-group": "warm"}, scope="acme")[0].runner_group == "warm"


def test_runner_group_has_a_maximum_length() -> None:
    longest = "g" * MAX_GROUP
    assert parse({**LARGE, "runner-group": longest}, scope="acme")[0].runner_group == longest
    assert "runner-group" in refuse({**LARGE, "runner-group": f"{longest}g"}, scope="acme").message


def test_class_must_exist_in_the_pool() -> None:
    sets = parse({**LARGE, "resource-class": "huge"})
    with pytest.raises(UserError, match="resource-class of 'large' is 'huge', which is not a class") as refused:
        check_fits_pool(sets, classes=["large", "xlarge"], reuse=Reuse.SAME_TRUST)
    assert refused.value.fix == "use one of large, xlarge, or add it to resource-class-config"


def test_reuse_within_a_repository_needs_the_scope_of_one() -> None:
    check_fits_pool(parse(LARGE), classes=["large"], reuse=Reuse.SAME_REPO)
    check_fits_pool(parse(LARGE, scope="acme"), classes=["large"], reuse=Reuse.SAME_TRUST)
    with pytest.raises(UserError, match="scope of 'large' is the organization 'acme', but reuse is same-repo"):
        check_fits_pool(parse(LARGE, scope="acme"), classes=["large"], reuse=Reuse.SAME_REPO)


def test_maximum_above_that_of_the_pool_is_a_warning() -> None:
    assert capacity_warnings(parse(LARGE), max_instances=20) == []
    (warning,) = capacity_warnings(parse(LARGE), max_instances=19)
    assert warning.startswith("runner-sets: max of 'large' is 20, but max-instances is 19")


# Labels and windows -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("labels", "is_served"),
    [
        (["self-hosted", "remuda", "large"], True),
        (["LARGE", "Remuda"], True),
        (["remuda"], True),
        (["remuda", "gpu"], False),
        ([], False),
    ],
)
def test_job_is_served_if_the_set_has_all_its_labels(labels: list[str], is_served: bool) -> None:  # noqa: FBT001
    assert parse(LARGE)[0].serves(labels) is is_served


def test_first_open_window_applies() -> None:
    windows = [
        {"cron": "* 9-17 * * 1-5", "time-zone": "Europe/Berlin", "hot": 2, "warm": 3},
        {"cron": "* * * * 1-5", "warm": 1},
    ]
    (parsed,) = parse({**LARGE, "windows": windows})

    def at(day: int, hour: int) -> tuple[int, int]:
        window = parsed.capacity_at(datetime(2026, 6, day, hour, 30, tzinfo=UTC), zone_of=time_zone)
        return window.hot, window.warm

    # Berlin is two hours ahead of UTC in June; the 5th is a Friday.
    assert (at(5, 7), at(5, 6), at(5, 16), at(6, 12)) == ((2, 3), (0, 1), (0, 1), (0, 0))


# Settings -----------------------------------------------------------------------------------------------------------


def test_shown_configuration_can_be_written_again() -> None:
    documents = [
        {**LARGE, "windows": [{"cron": "* 9-17 * * 1-5", "time-zone": "Europe/Berlin", "hot": 1, "warm": 2}]},
        {**LARGE, "name": "forks", "labels": ["forks"], "trust": "untrusted", "usage-class": "spot", "scope": "acme"},
    ]
    settings = load({"runner_sets": json.dumps(documents), "github_scope": SCOPE}, environ={})
    shown = config_rows(settings)["runner-sets"]
    assert shown["source"] == "--runner-sets"
    assert [item["scope"] for item in shown["value"]] == [SCOPE, "acme"]
    assert parse(*shown["value"], scope="else/where") == settings.runner_sets
    lines = "\n".join(str(cell) for row in config_table(settings).rows for cell in row)
    assert "large: labels self-hosted remuda large, up to 20 large, for acme/app, trusted, window" in lines
    assert "forks: labels forks, up to 20 spot forks, for acme, untrusted" in lines


def test_example_is_valid() -> None:
    assert [item.name for item in parse(*json.loads(EXAMPLE))] == ["large"]
