"""Versions of the actions runner: launch options, the pool's release, its deadline and its warnings."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remuda.domain.errors import UserError
from remuda.domain.runner_release import (
    REFUSED_AFTER,
    SHA256,
    UNCHECKED_AFTER,
    URL,
    VERSION,
    WARN_BEFORE,
    PackageArchitecture,
    RunnerChoice,
    RunnerRelease,
    is_newer,
    release_url,
    resolve_release,
)
from remuda.domain.serialization import from_document, to_document
from simulation.memory.github import runner_release
from tests.support.records import NOW

DIGEST, OTHER = "0" * 64, "f" * 64
MIRROR = "s3://bucket/runner/actions-runner.tar.gz"


def parse(version: str = "", sha256: str = "", url: str = "") -> RunnerChoice:
    return RunnerChoice.parse({VERSION: version, SHA256: sha256, URL: url})


def latest(newest: str | None, stored: RunnerRelease | None = None, *, after_days: float = 0) -> RunnerRelease | None:
    return resolve_release(
        parse("latest"), runner_release(newest) if newest else None, stored, now=NOW + timedelta(days=after_days)
    )


def fixed(
    version: str, newest: str | None, stored: RunnerRelease | None = None, *, after_days: float = 0
) -> RunnerRelease:
    found = resolve_release(
        parse(version, DIGEST),
        runner_release(newest) if newest else None,
        stored,
        now=NOW + timedelta(days=after_days),
    )
    assert found is not None
    return found


# Launch options


@pytest.mark.parametrize(("given_version", "version"), [("", "image"), ("image", "image"), ("latest", "latest")])
def test_options_without_a_fixed_version(given_version: str, version: str) -> None:
    assert parse(given_version) == RunnerChoice(version=version)


def test_fixed_version_with_one_digest_serves_both_architectures() -> None:
    release = parse("2.336.0", DIGEST).release
    assert release is not None
    assert [(item.architecture, item.url, item.sha256) for item in release.packages] == [
        (each, release_url("2.336.0", each), DIGEST) for each in PackageArchitecture
    ]


def test_fixed_version_with_values_per_architecture() -> None:
    release = parse("2.336.0", f"arm64={OTHER}, x64={DIGEST}", f"x64={MIRROR}").release
    assert release is not None
    found = {item.architecture: (item.sha256, item.url) for item in release.packages}
    assert found == {
        PackageArchitecture.X64: (DIGEST, MIRROR),
        PackageArchitecture.ARM64: (OTHER, release_url("2.336.0", PackageArchitecture.ARM64)),
    }


@pytest.mark.parametrize(
    ("version", "sha256", "url", "field"),
    [
        ("newest", "", "", VERSION),
        ("v2.336.0", DIGEST, "", VERSION),
        ("2.336", DIGEST, "", VERSION),
        ("2.328.9", DIGEST, "", VERSION),
        ("1.999.0", DIGEST, "", VERSION),
        ("2.336.0", "", "", SHA256),
        ("2.336.0", "abc", "", SHA256),
        ("2.336.0", f"x86={DIGEST}", "", SHA256),
        ("2.336.0", f"x64={DIGEST},x64={OTHER}", "", SHA256),
        ("2.336.0", f"x64={DIGEST},", "", SHA256),
        ("2.336.0", DIGEST, "http://example.com/r.tar.gz", URL),
        ("2.336.0", DIGEST, "https://example.com/r.zip", URL),
        ("2.336.0", DIGEST, "https://user:secret@example.com/r.tar.gz", URL),
        ("2.336.0", DIGEST, "https://example.com/r.tar.gz?X-Amz-Signature=secret", URL),
        ("latest", DIGEST, "", SHA256),
        ("", "", MIRROR, URL),
        ("image", "", MIRROR, URL),
    ],
)
def test_invalid_options_are_rejected_with_a_fix(version: str, sha256: str, url: str, field: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(version, sha256, url)
    assert caught.value.field == field
    assert caught.value.fix
    assert field in caught.value.message
    assert "secret" not in caught.value.message


def test_version_below_githubs_minimum_is_named() -> None:
    with pytest.raises(UserError, match=r"2\.328\.0, but GitHub registers no runners below 2\.329\.0"):
        parse("2.328.0", DIGEST)
    assert parse("2.329.0", DIGEST).release is not None


def test_options_of_a_release_are_those_that_install_it() -> None:
    release = runner_release("2.336.0")
    assert RunnerChoice.parse(release.launch_options()).release == release


versions = st.tuples(st.integers(0, 99), st.integers(0, 999), st.integers(0, 99))


@given(versions, versions)
def test_versions_are_compared_by_number(one: tuple[int, ...], other: tuple[int, ...]) -> None:
    assert is_newer(".".join(map(str, one)), ".".join(map(str, other))) is (one > other)


# The pool's release


def test_latest_follows_github() -> None:
    first = latest("2.336.0")
    assert first is not None
    assert (first.version, first.latest, first.checked_at, first.deadline) == ("2.336.0", "2.336.0", NOW, None)
    second = latest("2.337.0", first, after_days=3)
    assert second is not None
    assert (second.version, second.packages) == ("2.337.0", runner_release("2.337.0").packages)
    assert second.deadline is None


def test_stored_release_stays_while_github_does_not_answer() -> None:
    first = latest("2.336.0")
    assert latest(None, first, after_days=3) == first
    assert latest(None) is None


def test_latest_does_not_go_back_to_an_older_version() -> None:
    """During a rollout GitHub's answers may alternate between two versions."""
    first = latest("2.337.0")
    found = latest("2.336.0", first, after_days=1)
    assert found is not None
    assert (found.version, found.deadline) == ("2.337.0", None)


def test_latest_replaces_a_fixed_version_that_github_never_offered() -> None:
    found = latest("2.336.0", fixed("2.999.0", "2.336.0"))
    assert found is not None
    assert found.version == "2.336.0"


def test_image_has_no_release() -> None:
    assert resolve_release(parse("image"), runner_release("2.336.0"), latest("2.336.0"), now=NOW) is None


def test_deadline_of_a_fixed_version_counts_from_the_first_newer_version() -> None:
    release = fixed("2.336.0", "2.336.0")
    assert release.deadline is None
    release = fixed("2.336.0", "2.337.0", release, after_days=2)
    assert release.deadline == NOW + timedelta(days=2) + REFUSED_AFTER
    release = fixed("2.336.0", "2.338.0", release, after_days=20)
    assert (release.latest, release.deadline) == ("2.338.0", NOW + timedelta(days=2) + REFUSED_AFTER)
    unanswered = fixed("2.336.0", None, release, after_days=21)
    assert unanswered == release
    assert fixed("2.338.0", "2.338.0", release, after_days=22).deadline is None


def test_warning_begins_a_week_before_the_deadline() -> None:
    release = fixed("2.336.0", "2.337.0", fixed("2.336.0", "2.336.0"))
    deadline = NOW + REFUSED_AFTER

    def checked(days: float) -> RunnerRelease:
        return fixed("2.336.0", "2.337.0", release, after_days=days)

    assert checked(22).warning(deadline - WARN_BEFORE - timedelta(seconds=1)) is None
    soon = str(checked(23).warning(deadline - WARN_BEFORE))
    assert soon.startswith(f"GitHub refuses from {deadline:%Y-%m-%d} on runners of version 2.336.0, because 2.337.0")
    assert str(checked(30).warning(deadline)).startswith("GitHub may refuse runners of version 2.336.0")


def test_fixed_version_that_was_outdated_from_the_start_is_warned_about_at_once() -> None:
    """Nobody here knows when the newer version was released."""
    assert "may refuse runners of version 2.330.0" in str(fixed("2.330.0", "2.336.0").warning(NOW))


def test_runners_of_enterprise_servers_update_themselves() -> None:
    found = resolve_release(
        parse("2.330.0", DIGEST), runner_release("2.336.0"), None, now=NOW, github_url="https://github.example.com"
    )
    assert found is not None
    assert (found.version, found.latest, found.deadline, found.warning(NOW)) == ("2.330.0", "2.336.0", None, None)


def test_version_that_is_unchecked_for_long_is_warned_about() -> None:
    release = latest("2.336.0")
    assert release is not None
    assert release.warning(NOW + UNCHECKED_AFTER - timedelta(seconds=1)) is None
    assert "could not ask GitHub" in str(release.warning(NOW + UNCHECKED_AFTER))
    assert "could not ask GitHub" in str(fixed("2.336.0", None).warning(NOW))


def test_release_is_stored_and_checked_when_read() -> None:
    release = latest("2.336.0")
    assert release is not None
    document = to_document(release)
    assert from_document(RunnerRelease, document) == release
    package = dict(document["packages"][0])
    for spoiled in (
        {**document, "version": "2.336.0; reboot"},
        {**document, "packages": [{**package, "url": "https://evil.example.com/r.tar.gz'; reboot; '"}]},
        {**document, "packages": [{**package, "sha256": "0"}]},
        {**document, "packages": [{**package, "architecture": "arm"}]},
    ):
        with pytest.raises(ValueError, match=r"version|packages|URL|architecture"):
            from_document(RunnerRelease, spoiled)
