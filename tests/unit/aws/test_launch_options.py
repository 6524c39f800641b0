"""Launch options: root volumes, job image, cache volumes and kernel modules. tests/conformance covers the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from remuda.adapters.aws.ec2.create_fleet import machine_tags
from remuda.adapters.aws.ec2.options import MAX_CACHE_PATHS, NAMES, Ec2LaunchOptions
from remuda.adapters.aws.ec2.template import RootDevice, check_same_root
from remuda.domain.errors import UserError
from remuda.ports.compute import POOL_TAG
from tests.support.records import launch_request
from tests.support.user_data import NEEDED

DIGEST = "0" * 64


def parse(**launch: str) -> Ec2LaunchOptions:
    return Ec2LaunchOptions.parse(NEEDED | {name.replace("_", "-"): value for name, value in launch.items()})


def rejected(**launch: str) -> UserError:
    with pytest.raises(UserError) as caught:
        parse(**launch)
    assert caught.value.fix
    return caught.value


def test_without_these_options_there_is_no_job_image_and_no_cache() -> None:
    options = parse()
    assert (options.job_image_url, options.cache_paths, options.cache_gib) == ("", (), "20")


@pytest.mark.parametrize(
    "url", ["s3://bucket/jobs.tar", "https://example.com/jobs.tar.gz", "s3://bucket/a/jobs.tar.xz"]
)
def test_job_image_is_an_archive_with_a_digest(url: str) -> None:
    options = parse(job_image_url=url, job_image_sha256=DIGEST)
    assert (options.job_image_url, options.job_image_sha256) == (url, DIGEST)
    assert rejected(job_image_url=url).field == "job-image-sha256"


@pytest.mark.parametrize(
    "url", ["http://example.com/jobs.tar", "https://example.com/jobs.zip", "docker.io/library/ubuntu", "/jobs.tar"]
)
def test_other_urls_of_job_images_are_rejected(url: str) -> None:
    assert rejected(job_image_url=url, job_image_sha256=DIGEST).field == "job-image-url"


def test_credential_in_the_url_of_a_job_image_is_rejected_and_not_shown() -> None:
    error = rejected(job_image_url="https://user:secret@example.com/jobs.tar", job_image_sha256=DIGEST)
    assert error.field == "job-image-url"
    assert "secret" not in error.message


def test_cache_paths_are_separated_by_commas_or_blanks() -> None:
    options = parse(cache_paths="/var/lib/docker, /home/runner/.cache /opt/hostedtoolcache,/var/lib/docker")
    assert options.cache_paths == ("/var/lib/docker", "/home/runner/.cache", "/opt/hostedtoolcache")


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "//",
        "/etc",
        "/etc/ssh",
        "/opt",
        "/opt/remuda",
        "/opt/remuda/runner",
        "/proc/sys",
        "/run/docker",
        "/sys/fs/cgroup",
        "/dev/mqueue",
        "/home/runner",
        "/a/../b",
        "/a/..",
        "/a/./b",
        "/a//b",
        "/a/b/",
        "home/runner/.cache",
        "~/.cache",
        "$HOME/.cache",
        "/a/b:c",
        "/a/b'c",
        "/a/b%c",
        f"/a/{'b' * 101}",
        "/a" * 9,
    ],
)
def test_unsafe_cache_paths_are_rejected(path: str) -> None:
    error = rejected(cache_paths=f"/home/runner/.cache,{path}")
    assert error.field == "cache-paths"
    assert path[:20] in error.message


def test_names_that_only_begin_like_a_reserved_folder_are_accepted() -> None:
    paths = ("/opt/remuda-tools", "/home/runner2", "/home/runner/..cache")
    assert parse(cache_paths=",".join(paths[:2])).cache_paths == paths[:2]
    assert rejected(cache_paths=paths[2]).field == "cache-paths"


@pytest.mark.parametrize(
    "paths", ["/var/lib/docker,/var/lib/docker/volumes", "/home/runner/.m2/repository,/home/runner/.m2"]
)
def test_cache_paths_inside_each_other_are_rejected(paths: str) -> None:
    error = rejected(cache_paths=paths)
    assert error.field == "cache-paths"
    assert "part of" in error.message


def test_number_of_cache_paths_is_limited() -> None:
    paths = [f"/cache/{number}" for number in range(MAX_CACHE_PATHS + 1)]
    assert len(parse(cache_paths=",".join(paths[:-1])).cache_paths) == MAX_CACHE_PATHS
    assert rejected(cache_paths=",".join(paths)).field == "cache-paths"


@pytest.mark.parametrize("size", ["0", "-1", "1.5", "020", "100000", "20GiB", "many"])
def test_invalid_cache_sizes_are_rejected(size: str) -> None:
    assert rejected(cache_paths="/var/lib/docker", cache_size_gib=size).field == "cache-size-gib"


@pytest.mark.parametrize(
    ("value", "modules"), [("", ()), ("nfs, sch_netem nfs", ("nfs", "sch_netem")), ("any", ("any",))]
)
def test_kernel_modules_are_names_or_any(value: str, modules: tuple[str, ...]) -> None:
    assert parse(kernel_modules=value).modules == modules


@pytest.mark.parametrize("value", ["-r", "any,nfs", "../x", "a.ko", "x" * 56, ",".join(f"m{n}" for n in range(17))])
def test_other_kernel_modules_are_rejected(value: str) -> None:
    assert rejected(kernel_modules=value).field == "kernel-modules"


def test_cache_size_is_a_number_of_gib() -> None:
    assert parse(cache_size_gib=" 40 ").cache_gib == "40"


@pytest.mark.parametrize("name", NAMES)
def test_every_launch_option_is_a_documented_setting(name: str) -> None:
    reference = (Path(__file__).parents[3] / "docs" / "reference" / "settings.md").read_text(encoding="utf-8")
    assert f"| `{name}` |" in reference


def test_the_root_volume_must_fit_the_images_of_classes() -> None:
    pool, large = RootDevice(name="/dev/xvda", gib=8), RootDevice(name="/dev/xvda", gib=50)
    check_same_root("an image", pool, pool, parse().volume, field="ami")
    check_same_root("an image", large, pool, parse(volume_size_gib="50").volume, field="ami")
    with pytest.raises(UserError, match="root volume of 50 GiB, and the volumes of the pool have 30 GiB") as caught:
        check_same_root("an image", large, pool, parse().volume, field="ami")
    assert caught.value.field == "volume-size-gib"


@pytest.mark.parametrize(
    ("kind", "gib", "iops", "throughput"),
    [
        ("gp3", "", "15000", ""),  # the default is 30 GiB
        ("gp3", "1", "3000", "750"),  # the baseline
        ("gp3", "160", "80000", "2000"),
        ("gp3", "16", "8000", "2000"),
        ("io1", "4", "100", ""),
        ("io1", "4", "200", ""),
        ("io2", "4", "100", ""),
        ("io2", "4", "4000", ""),
    ],
)
def test_performance_of_root_volumes_up_to_the_ratios(kind: str, gib: str, iops: str, throughput: str) -> None:
    launch = {"volume-type": kind, "volume-size-gib": gib, "volume-iops": iops, "volume-throughput": throughput}
    assert parse(**launch).volume.iops == int(iops)


@pytest.mark.parametrize(
    ("launch", "message", "fix"),
    [
        (
            {"volume-iops": "15001"},
            "volume-iops is 15001, but volumes of type gp3 with 30 GiB have at most 15000",
            "set volume-iops to at most 15000, or volume-size-gib to at least 31",
        ),
        (
            {"volume-type": "io1", "volume-iops": "5001", "volume-size-gib": "100"},
            "volume-iops is 5001, but volumes of type io1 with 100 GiB have at most 5000",
            "set volume-iops to at most 5000, or volume-size-gib to at least 101",
        ),
        (
            {"volume-type": "io2", "volume-iops": "30001"},
            "volume-iops is 30001, but volumes of type io2 with 30 GiB have at most 30000",
            "set volume-iops to at most 30000, or volume-size-gib to at least 31",
        ),
        (
            {"volume-throughput": "751"},
            "volume-throughput is 751, but volumes with 3000 IOPS have at most 750",
            "set volume-throughput to at most 750, or volume-iops to at least 3004",
        ),
    ],
)
def test_performance_beyond_the_ratios_is_rejected(launch: dict[str, str], message: str, fix: str) -> None:
    error = rejected(**launch)
    assert (error.message, error.fix) == (message, fix)


@pytest.mark.parametrize("kind", ["io1", "io2"])
@pytest.mark.parametrize(("gib", "iops", "field"), [("3", "100", "volume-size-gib"), ("4", "99", "volume-iops")])
def test_provisioned_volumes_below_the_minimum_are_rejected(kind: str, gib: str, iops: str, field: str) -> None:
    launch = {"volume-type": kind, "volume-size-gib": gib, "volume-iops": iops}
    assert rejected(**launch).field == field


# Own tags -------------------------------------------------------------------------------------------------------------


def test_own_tags_are_pairs() -> None:
    wanted = {"team": "ci", "cost-center": "42", "page": "https://wiki/a=b", "empty": ""}
    assert parse(tags="team=ci, cost-center=42,page=https://wiki/a=b,empty=").tags == wanted
    assert parse().tags == {}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("team", "no pair"),
        ("remuda:pool=other", "reserved"),
        ("aws:name=x", "reserved"),
        ("AWS:name=x", "reserved"),
        ("ghr:environment=x", "reserved"),
        ("a/b=c", "not valid"),
        ("=x", "not valid"),
        ("_index=x", "not valid"),
        (f"a={'x' * 257}", "not valid"),
        ("a=1,a=2", "twice"),
        (",".join(f"k{number}=x" for number in range(31)), "31 tags"),
    ],
)
def test_tags_that_aws_or_the_pool_would_refuse_are_rejected(text: str, why: str) -> None:
    error = rejected(tags=text)
    assert error.field == "tags"
    assert why in error.message


def test_no_own_tag_replaces_one_of_the_pool() -> None:
    options = parse(tags="team=ci")
    made = machine_tags(launch_request("token"), options, "ci")
    assert (made["team"], made[POOL_TAG]) == ("ci", "ci")
    assert set(machine_tags(launch_request("token"), parse(), "ci")) == set(made) - {"team"}
