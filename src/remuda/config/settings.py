"""Settings: each declared once.

The declaration of a setting yields its flag, its environment variable, its key in remuda.toml, its action input, its
CloudFormation parameter and its line in the reference. `config.sources` reads the values.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import tzinfo
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from remuda.config.declaration import (
    ALL_COMMANDS,
    DEPLOY_COMMANDS,
    POOL_COMMANDS,
    Group,
    InvalidValue,
    Secret,
    Setting,
    ValueKind,
    boolean,
    choice,
    declare,
    duration,
    flag,
    integer,
    number,
    secret,
    text,
    variable,
)
from remuda.domain.errors import UserError
from remuda.domain.resources import (
    DEFAULT_CLASSES,
    ResourceClass,
    Reuse,
    Tier,
    TypePatterns,
    UsageClass,
    check_repository,
    check_run_id,
    check_scope,
    parse_classes,
)
from remuda.domain.runner_release import LATEST
from remuda.domain.runner_set import EXAMPLE as RUNNER_SETS_EXAMPLE
from remuda.domain.runner_set import FIX as RUNNER_SETS_FIX
from remuda.domain.runner_set import RunnerSet, parse_runner_sets
from remuda.domain.scale_down.idle_config import EXAMPLE as IDLE_CONFIG_EXAMPLE
from remuda.domain.scale_down.idle_config import FIX as IDLE_CONFIG_FIX
from remuda.domain.scale_down.idle_config import IdleWindow, parse_idle_config
from remuda.domain.scale_down.policy import BOOT_MIN, IdleScope, ScaleDownPolicy
from remuda.domain.thresholds import Lifetimes
from remuda.domain.workflow_identity import MAX_ENVIRONMENT_CHARS, RepositoryPattern
from remuda.source_repository import address_of_remote

#: ARN of a managed policy, of AWS or of an account.
BOUNDARY = re.compile(r"arn:[a-z-]+:iam::([0-9]{12}|aws):policy/[!-~]{1,512}")
#: A path of IAM. The pattern is part of the template, too.
ROLE_PATH = re.compile(r"/([A-Za-z0-9+=,.@_-]+/){0,8}")
DAY_S = 86_400.0
WEEK_S = 7 * DAY_S
WEEK_MIN = 7 * 1_440
#: A GitHub token is valid for an hour and renewed after ten minutes; it must stay valid throughout a provision.
MAX_PROVISION_S = 2_400.0
MAX_SCRIPT_CHARS = 10_000
MAX_TAG_CHARS = 256
#: Dollars per month.
MAX_BUDGET = 10_000_000
MAX_GROUP_CHARS = 64
#: Commands with a choice of the backend.
LOCAL_COMMANDS = tuple(name for name in ALL_COMMANDS if name not in DEPLOY_COMMANDS)
#: Default clock margin in seconds, by backend.
LOCAL_MARGIN_S = 1.0
AWS_MARGIN_S = 60.0
GITHUB_ISSUER = "https://token.actions.githubusercontent.com"
CLASSES_EXAMPLE = '{"large": {"cpu": 2, "mmem": 4096}}'

_POOL_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,19}")


# Parsers ------------------------------------------------------------------------------------------------------------


def _parse_dir(value: str) -> Path:
    """An empty text would be the current directory, which `down --purge` would remove."""
    if not value.strip() or "\0" in value:
        raise InvalidValue
    try:
        Path(value).absolute().exists()
    except OSError as error:
        raise InvalidValue(error.strerror or "") from None
    return Path(value)


def _parse_pool(value: str) -> str:
    if not _POOL_NAME.fullmatch(value):
        raise InvalidValue
    return value


def _parse_url(value: str) -> str:
    try:
        parts = urlsplit(value)
        # Reading the port checks it.
        is_url = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0 and value.isprintable()
    except ValueError:
        is_url = False
    if value and not is_url:
        raise InvalidValue
    return value


def _parse_tag(value: str) -> str:
    """The value of a tag. A wildcard would make EC2's filter match other environments."""
    if len(value) > MAX_TAG_CHARS or any(char in value for char in "*?\\") or not value.isprintable():
        raise InvalidValue
    return value


def _parse_group(value: str) -> str:
    value = value.strip()
    if len(value) > MAX_GROUP_CHARS or not value.isprintable():
        raise InvalidValue
    return value


def _parse_script(value: str) -> str:
    if len(value) > MAX_SCRIPT_CHARS:
        raise InvalidValue(f"the script has {len(value)} characters")
    return value


def _parse_types(value: Any) -> TypePatterns:
    if not isinstance(value, str | list):
        raise InvalidValue
    return TypePatterns.parse(value if isinstance(value, str) else " ".join(map(str, value)))


def _parse_classes(value: Any) -> tuple[ResourceClass, ...]:
    return parse_classes(_from_json(value, field="resource-class-config", fix=f"give JSON such as {CLASSES_EXAMPLE}"))


def _parse_idle_config(value: Any) -> tuple[IdleWindow, ...]:
    return parse_idle_config(_from_json(value, field="idle-config", fix=IDLE_CONFIG_FIX), zone_of=time_zone)


def _parse_runner_sets(value: Any) -> tuple[RunnerSet, ...]:
    """Sets without a scope get that of the pool when all settings are known."""
    document = _from_json(value, field="runner-sets", fix=RUNNER_SETS_FIX)
    return parse_runner_sets(document, default_scope="", zone_of=time_zone)


def _words(value: Any) -> list[str]:
    """The elements of a list, or of a text that separates them by commas."""
    elements = value.split(",") if isinstance(value, str) else value
    if not isinstance(elements, list) or not all(isinstance(each, str) for each in elements):
        raise InvalidValue
    return [each.strip() for each in elements if each.strip()]


def _parse_repositories(value: Any) -> tuple[RepositoryPattern, ...]:
    found = []
    for word in _words(value):
        try:
            found.append(RepositoryPattern.parse(word))
        except ValueError:
            raise InvalidValue(f"{word[:MAX_TAG_CHARS]!r} is not a repository") from None
    return tuple(found)


def _parse_environments(value: Any) -> tuple[str, ...]:
    found = tuple(_words(value))
    if any(len(each) > MAX_ENVIRONMENT_CHARS or not each.isprintable() for each in found):
        raise InvalidValue
    return found


def _parse_issuer(value: str) -> str:
    """An issuer without HTTPS could be impersonated. Loopback addresses are for tests."""
    url = _parse_url(value).rstrip("/")
    parts = urlsplit(url)
    is_local = parts.scheme == "http" and parts.hostname in {"127.0.0.1", "::1", "localhost"}
    if (parts.scheme != "https" and not is_local) or parts.query or parts.fragment or parts.username:
        raise InvalidValue
    return url


def _parse_boundary(value: str) -> str:
    if value and not BOUNDARY.fullmatch(value):
        raise InvalidValue
    return value


def _parse_role_path(value: str) -> str:
    """IAM's form of a path: it begins and ends with a slash."""
    if not ROLE_PATH.fullmatch(value):
        raise InvalidValue
    return value


def _parse_source_repository(value: str) -> str:
    """The address of the repository."""
    address = address_of_remote(value) or address_of_remote(f"https://github.com/{value}")
    if value and not address:
        raise InvalidValue
    return address


def _from_json(value: Any, *, field: str, fix: str) -> Any:
    """Decode JSON text. In the file the value may also be a table or a list."""
    if isinstance(value, bool):
        raise InvalidValue
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{field} is not JSON: {error}", field=field, fix=fix) from None


def time_zone(name: str) -> tzinfo:
    """The time zone of that name, in any letter case as in a browser. Raises ValueError for an unknown name."""
    from zoneinfo import ZoneInfo, available_timezones  # noqa: PLC0415 - only idle windows have a time zone

    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        for known in available_timezones():
            if known.lower() == name.lower():
                return ZoneInfo(known)
        raise ValueError(f"there is no time zone {name!r}") from None


def _seconds(least: float, most: float) -> ValueKind:
    return duration(least, most)


_MINUTES = duration(0, WEEK_MIN, "minutes")


def _launch_option(
    metavar: str,
    description: str,
    *,
    commands: tuple[str, ...] = ("refresh",),
    is_parameter: bool = True,
    default: str = "",
    default_text: str = "",
) -> Any:
    """A setting of new EC2 instances; the EC2 adapter checks its value. An empty value is the default."""
    return declare(
        text(metavar=metavar, numbers=True, parse=lambda value: value if value.strip() else default),
        default,
        description,
        group=Group.AWS,
        commands=commands,
        is_parameter=is_parameter,
        is_launch_option=True,
        default_text=default_text,
    )


_run_option = partial(declare, group=Group.RUN, commands=("provision",))
_pool_option = partial(declare, group=Group.POOL, commands=("refresh",))
#: Without a flag: for experts, in the file and the environment.
_pool_tunable = partial(declare, group=Group.POOL)
_github_setting = partial(declare, group=Group.GITHUB)
_scale_down_option = partial(declare, group=Group.SCALE_DOWN, commands=("scale-down",))
_broker_setting = partial(declare, group=Group.BROKER)


# Declarations -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """The values of all settings. `config.sources.load` makes it; a direct constructor call checks nothing."""

    #: The source of each value that is not the default, as the user wrote it: a flag, a variable, a key of the file.
    origins: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    #: These values as they were written, without credentials.
    written: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    #: The settings file that was named with --config; empty for the default one.
    file: str = field(default="", compare=False, repr=False)

    backend: str = declare(
        choice(("local", "aws")),
        "local",
        "Where instances run: processes on this machine, or EC2.",
        group=Group.COMMON,
        commands=LOCAL_COMMANDS,
        is_input=False,
    )
    dir: Path = declare(
        text(expected="a directory that you can write to", metavar="DIRECTORY", parse=_parse_dir),
        Path(".remuda"),
        "State directory of the local backend.",
        group=Group.COMMON,
        commands=LOCAL_COMMANDS,
        is_input=False,
    )
    pool: str = declare(
        text(
            expected="1 to 20 lower-case letters, digits and hyphens, and not start with a hyphen",
            metavar="NAME",
            parse=_parse_pool,
        ),
        "default",
        "Name of the pool.",
        group=Group.COMMON,
        commands=(*POOL_COMMANDS, *DEPLOY_COMMANDS),
    )
    github_scope: str = _github_setting(
        text(metavar="OWNER[/REPO]", parse=check_scope),
        "remuda/demo",
        "Organization or repository that runners register in.",
        commands=("refresh", "provision", "doctor", "run-workflow"),
        is_parameter=True,
        other_variables=("GITHUB_REPOSITORY",),
        default_text="GITHUB_REPOSITORY",
    )
    github_token: Secret | None = _github_setting(
        secret(expected="a GitHub token, or the ARN of a Secrets Manager secret", is_token=True),
        None,
        "Token that may manage self-hosted runners, or the ARN of a Secrets Manager secret that contains it. "
        "refresh and scale-down need a credential; provision needs one for ephemeral runners.",
        is_input=True,
    )
    github_app_id: str = _github_setting(
        text(), "", "Id of a GitHub App, instead of a token.", is_input=True, is_parameter=True
    )
    github_app_key: Secret | None = _github_setting(
        secret(expected="PEM text, the path of a PEM file, or the ARN of a Secrets Manager secret"),
        None,
        "Private key of the GitHub App: PEM text, the path of a PEM file, or the ARN of a Secrets Manager secret.",
        is_input=True,
    )
    runner_group: str = _github_setting(
        text(
            expected=f"the name of a runner group: up to {MAX_GROUP_CHARS} printable characters",
            metavar="NAME",
            parse=_parse_group,
        ),
        "",
        "Runner group of the organization that runners join. It decides which repositories may use them.",
        commands=("refresh",),
        is_parameter=True,
        default_text="the default group",
    )
    github_api_url: str = _github_setting(
        text(expected="a URL such as https://HOST/api/v3", metavar="URL", parse=_parse_url),
        "",
        "URL of the GitHub API. The local backend has its own.",
        is_parameter=True,
        other_variables=("GITHUB_API_URL",),
        default_text="https://api.github.com",
    )

    run_id: str = declare(
        text(metavar="ID", parse=lambda value: check_run_id(value) if value else "", numbers=True),
        "",
        "Run id of the workflow; it is the label of the run's runners.",
        group=Group.RUN,
        commands=("provision", "release", "run-workflow"),
        other_variables=("GITHUB_RUN_ID",),
        default_text="GITHUB_RUN_ID",
    )
    run_attempt: int = declare(
        integer(1, 1_000_000),
        1,
        "Attempt number of the run.",
        group=Group.RUN,
        commands=("provision", "release", "run-workflow"),
        other_variables=("GITHUB_RUN_ATTEMPT",),
        default_text="GITHUB_RUN_ATTEMPT, or 1",
    )
    instance_count: int = _run_option(integer(1, 1_000), 1, "Number of runners.")
    resource_class: str = _run_option(
        text(metavar="CLASS"), "large", "Resource class of the runners, such as large or 2xlarge."
    )
    usage_class: UsageClass = _run_option(choice(UsageClass), UsageClass.ON_DEMAND, "Purchase option of the instances.")
    allowed_instance_types: TypePatterns = _run_option(
        ValueKind(metavar="PATTERNS", expected="words such as 'c* m6i.large'", parse=_parse_types),
        TypePatterns(("*",)),
        "Instance types that may serve the run, such as 'c* m6i.large'.",
    )
    tier: Tier = _run_option(
        choice(Tier),
        Tier.TRUSTED,
        "Trust in the run's code. It can lower the trust that the workflow's event implies, not raise it.",
        default_text="from the event",
    )
    repository: str = _run_option(
        text(metavar="OWNER/REPO", parse=lambda value: check_repository(value) if value else ""),
        "",
        "Repository of the run, for runners of an organization.",
        other_variables=("GITHUB_REPOSITORY",),
        default_text="GITHUB_REPOSITORY, or the scope",
    )
    event_name: str = declare(
        text(),
        "",
        "Event that started the run.",
        group=Group.RUN,
        other_variables=("GITHUB_EVENT_NAME",),
        default_text="GITHUB_EVENT_NAME",
    )
    event_path: str = declare(
        text(),
        "",
        "File with the payload of that event.",
        group=Group.RUN,
        other_variables=("GITHUB_EVENT_PATH",),
        default_text="GITHUB_EVENT_PATH",
    )
    ephemeral: bool = _run_option(
        boolean(),
        False,
        "Launch new instances that serve one job each, with just-in-time registration. Requires a GitHub credential.",
    )
    add: bool = _run_option(
        boolean(),
        False,
        "Add runners to a run that has runners of the class already. Without it, a second provision is refused.",
    )

    max_runtime_min: float = declare(
        duration(0.05, WEEK_MIN, "minutes"),
        360.0,
        "Minutes that a run may keep its runners. refresh sets the limit of the pool, provision that of one run.",
        group=Group.POOL,
        commands=("refresh", "provision"),
        is_parameter=True,
    )
    provision_timeout_sec: float = declare(
        _seconds(2, MAX_PROVISION_S),
        300.0,
        "Seconds within which all runners of a run must be registered. "
        "refresh sets the limit of the pool, provision that of one run.",
        group=Group.POOL,
        commands=("refresh", "provision"),
    )
    idle_time_sec: float = _pool_option(
        _seconds(1, WEEK_S), 420.0, "Seconds that an idle instance stays in the pool.", is_parameter=True
    )
    release_time_sec: float = _pool_option(_seconds(5, DAY_S), 300.0, "Seconds that a release may take.")
    max_age_sec: float = _pool_option(
        _seconds(10, 365 * DAY_S), DAY_S, "Age in seconds beyond which an instance is not reused.", is_parameter=True
    )
    max_uses: int = _pool_option(
        integer(1, 100_000), 50, "Number of runs after which an instance is not reused.", is_parameter=True
    )
    reuse: Reuse = _pool_option(choice(Reuse), Reuse.SAME_TRUST, "Instances that a run may reuse.", is_parameter=True)
    max_instances: int = _pool_option(
        integer(1, 100_000), 100, "Maximum number of instances in the pool.", is_parameter=True
    )
    monthly_budget: float = _pool_option(
        number(0, MAX_BUDGET, "dollars"),
        0.0,
        "Cost of the pool's machines per month beyond which none is launched.",
        default_text="no limit",
    )
    resource_class_config: tuple[ResourceClass, ...] = _pool_option(
        ValueKind(
            metavar="JSON|@FILE",
            is_json=True,
            expected=f"JSON such as {CLASSES_EXAMPLE}, or @FILE",
            parse=_parse_classes,
            takes_file=True,
            takes_table=True,
        ),
        DEFAULT_CLASSES,
        f"Resource classes of the pool as JSON, such as {CLASSES_EXAMPLE} (memory in MiB).",
        is_parameter=True,
        default_text="seven classes, large to 16xlarge",
    )
    runner_sets: tuple[RunnerSet, ...] = _pool_option(
        ValueKind(
            metavar="JSON|@FILE",
            is_json=True,
            expected=f"JSON such as {RUNNER_SETS_EXAMPLE}, or @FILE",
            parse=_parse_runner_sets,
            takes_file=True,
        ),
        (),
        f"Runner sets as JSON, which serve all jobs with certain labels: {RUNNER_SETS_EXAMPLE}.",
        is_parameter=True,
        default_text="none",
    )
    pre_runner_script: str = _pool_option(
        text(
            expected=f"a shell script of up to {MAX_SCRIPT_CHARS} characters, or @FILE",
            metavar="TEXT|@FILE",
            parse=_parse_script,
            takes_file=True,
        ),
        "",
        "Shell script that a new instance runs before it registers: text, or @FILE.",
        is_launch_option=True,
    )

    margin_sec: float | None = _pool_tunable(
        _seconds(0.1, 3_600),
        None,
        "Seconds by which the clocks of two machines may differ.",
        default_text=f"{LOCAL_MARGIN_S:g} on the local backend, {AWS_MARGIN_S:g} on AWS",
    )
    listening_time_sec: float = _pool_tunable(
        _seconds(5, DAY_S),
        900.0,
        "Seconds that a runner of a runner set listens for a job; renewed while the set needs the runner.",
    )
    surplus_grace_sec: float = _pool_tunable(
        _seconds(0, DAY_S),
        60.0,
        "Seconds that a runner set may have more runners than it needs before they return to the pool.",
    )
    ended_run_grace_sec: float = _pool_tunable(
        _seconds(1, DAY_S),
        300.0,
        "Seconds after the end of a workflow run on GitHub after which refresh releases what the run still holds, "
        "because its workflow has not.",
    )
    unrecorded_grace_sec: float = _pool_tunable(
        _seconds(1, DAY_S), 300.0, "Seconds after which refresh terminates an instance without a record."
    )
    stale_registration_grace_sec: float = _pool_tunable(
        _seconds(1, DAY_S),
        900.0,
        "Seconds after which refresh removes a registration that has neither a record nor an instance.",
    )
    gone_after_sec: float = _pool_tunable(
        _seconds(1, DAY_S), 60.0, "Seconds between two failed lookups before an instance counts as gone."
    )
    republish_sec: float = _pool_tunable(
        _seconds(1, DAY_S), 600.0, "Seconds after which refresh publishes an idle instance to the pool again."
    )
    keep_records_sec: float = _pool_tunable(
        _seconds(1, 3_650 * DAY_S), 30 * DAY_S, "Seconds that records of terminated instances are kept."
    )

    ami: str = _launch_option(
        "AMI", "Image of the instances: an AMI id, or resolve:ssm:NAME.", commands=("refresh", "doctor")
    )
    subnet_ids: str = _launch_option(
        "IDS", "Subnets to launch instances in, separated by commas or spaces.", commands=("refresh", "doctor")
    )
    security_group_ids: str = _launch_option(
        "IDS", "Security groups of the instances, separated by commas or spaces.", commands=("refresh", "doctor")
    )
    iam_instance_profile: str = _launch_option(
        "PROFILE", "Instance profile of the instances.", commands=("refresh", "doctor"), is_parameter=False
    )
    key_name: str = _launch_option("NAME", "Key pair of the instances.")
    tags: str = _launch_option(
        "TAGS",
        "Own tags of everything that is created on AWS: KEY=VALUE, separated by commas.",
        commands=("refresh", "deploy"),
    )
    volume_size_gib: str = _launch_option(
        "GIB", "Size of the root volume of the instances.", default_text="30, or the size of the image if larger"
    )
    volume_type: str = _launch_option("[gp3|gp2|io1|io2]", "Type of the root volume.", default_text="gp3")
    volume_iops: str = _launch_option(
        "INTEGER", "I/O operations per second of the root volume: gp3, io1 and io2.", default_text="3000 of gp3"
    )
    volume_throughput: str = _launch_option(
        "INTEGER", "Throughput of the root volume in MiB/s: gp3.", default_text="125"
    )
    volume_kms_key: str = _launch_option(
        "ARN", "KMS key of the root volume, which is always encrypted.", default_text="the account's key for EBS"
    )
    spot_fallback: str = _launch_option(
        "[on-demand]", "Purchase option to use if there is no spot capacity. Without it, the provision fails."
    )
    actions_runner_version: str = _launch_option(
        "[latest|image|VERSION]",
        "Version of the Actions runner: latest follows GitHub, image uses that of the image, a fixed version needs "
        "actions-runner-sha256.",
        default=LATEST,
    )
    actions_runner_sha256: str = _launch_option(
        "SHA256", "SHA-256 digest of the package of a fixed version, or one per architecture: x64=SHA256,arm64=SHA256."
    )
    actions_runner_url: str = _launch_option(
        "URL", "URL of a mirror of the package of a fixed version, or one per architecture: x64=URL,arm64=URL."
    )
    agent_url: str = _launch_option(
        "URL",
        "https:// or s3:// URL of the agent's bundle, or one per architecture: x86_64=URL,arm64=URL. Not needed if "
        "the image contains the agent.",
    )
    agent_sha256: str = _launch_option(
        "SHA256", "SHA-256 digest of the agent's bundle, or one per architecture: x86_64=SHA256,arm64=SHA256."
    )
    job_image_url: str = _launch_option(
        "URL", "URL of a tar archive with the root file system of jobs, instead of the instance's own."
    )
    job_image_sha256: str = _launch_option("SHA256", "SHA-256 digest of the job image.")
    cache_paths: str = _launch_option(
        "PATHS", "Folders of jobs that instances keep per repository and tier, separated by commas."
    )
    cache_size_gib: str = _launch_option(
        "GIB", "Size of all cache volumes of an instance. The oldest are deleted above it.", default_text="20"
    )
    kernel_modules: str = _launch_option(
        "[any|MODULES]",
        "Kernel modules that jobs need beside the usual ones, separated by commas. Instances load them at boot, and "
        "none later. With any, jobs may make the kernel load modules; an instance on which one did is not reused.",
    )
    github_environment: str = _launch_option(
        "VALUE", "Value of the ghr:environment tag of new instances.", default_text="the name of the pool"
    )

    environment: str = _scale_down_option(
        text(
            expected=f"the value of a tag: up to {MAX_TAG_CHARS} printable characters without wildcards",
            metavar="VALUE",
            parse=_parse_tag,
        ),
        "",
        "Value of the ghr:environment tag of the instances to scale down.",
        other_variables=("ENVIRONMENT",),
        default_text="github-environment, or the name of the pool",
    )
    idle_config: tuple[IdleWindow, ...] = _scale_down_option(
        ValueKind(
            metavar="JSON|@FILE",
            is_json=True,
            expected=f"JSON such as {IDLE_CONFIG_EXAMPLE}, or @FILE",
            parse=_parse_idle_config,
            takes_file=True,
        ),
        (),
        f"Number of idle runners to keep, by time of the week, as JSON: {IDLE_CONFIG_EXAMPLE}.",
        is_parameter=True,
        other_variables=("SCALE_DOWN_CONFIG",),
        default_text="none are kept",
    )
    minimum_running_time_in_minutes: float | None = _scale_down_option(
        _MINUTES,
        None,
        "Age in minutes below which a runner is kept.",
        is_parameter=True,
        other_variables=("MINIMUM_RUNNING_TIME_IN_MINUTES",),
        default_text="5 on Linux, 15 on Windows",
    )
    runner_boot_time_in_minutes: float = _scale_down_option(
        _MINUTES,
        BOOT_MIN,
        "Minutes after which an instance that is not registered on GitHub is an orphan.",
        is_parameter=True,
        other_variables=("RUNNER_BOOT_TIME_IN_MINUTES",),
    )
    idle_scope: IdleScope = _scale_down_option(
        choice(IdleScope),
        IdleScope.ENVIRONMENT,
        "What an idle count applies to: the whole environment, or each owner in it.",
    )
    max_removals_per_cycle: int | None = _scale_down_option(
        integer(0, 100_000),
        None,
        "Maximum number of runners that one cycle removes from GitHub.",
        default_text="unlimited",
    )

    repositories: tuple[RepositoryPattern, ...] = _broker_setting(
        ValueKind(
            metavar="REPOSITORIES",
            expected="repositories such as acme/app, acme/* or acme@1234/app@5678, separated by commas",
            parse=_parse_repositories,
        ),
        (),
        "Repositories whose workflows may use the pool through the broker, separated by commas: owner/name, owner/*, "
        "owner@id/name@id or owner@id/*.",
        commands=("deploy",),
        default_text="none; deploy: those of the scope",
    )
    environments: tuple[str, ...] = _broker_setting(
        ValueKind(
            metavar="NAMES",
            expected=f"names of GitHub environments of up to {MAX_ENVIRONMENT_CHARS} characters, separated by commas",
            parse=_parse_environments,
        ),
        (),
        "GitHub environments whose jobs may use the pool through the broker, separated by commas.",
        commands=("deploy",),
        default_text="all jobs may",
    )
    oidc_issuer: str = _broker_setting(
        text(
            expected="an https URL such as https://HOST/_services/token",
            metavar="URL",
            parse=lambda value: _parse_issuer(value) if value else GITHUB_ISSUER,
        ),
        GITHUB_ISSUER,
        "Issuer of the OIDC tokens of workflows; https://HOST/_services/token on GitHub Enterprise Server.",
        is_parameter=True,
    )
    trust_pull_requests: bool = _broker_setting(
        boolean(),
        False,
        "Whether runs of pull_request events are trusted. Set it only if no repository sends write tokens to workflows "
        "of pull requests from forks: OIDC tokens do not name the fork.",
        is_parameter=True,
    )

    source_repository: str = declare(
        text(expected="OWNER/REPO or https://HOST/OWNER/REPO", metavar="OWNER/REPO", parse=_parse_source_repository),
        "",
        "Repository of Remuda that workflows name in uses: and releases are downloaded from, such as your fork.",
        group=Group.COMMON,
        commands=("deploy",),
        default_text="that of the package, or the git remote of the clone",
    )
    permissions_boundary: str = declare(
        text(expected="the ARN of an IAM policy", metavar="POLICY", parse=_parse_boundary),
        "",
        "ARN of the policy that limits every role of the pool, as organizations require it.",
        group=Group.AWS,
        commands=("deploy",),
    )
    role_path: str = declare(
        text(expected="a path such as /ci/", metavar="PATH", parse=_parse_role_path),
        "/",
        "Path of the roles of the pool. Fixed when the stack is created.",
        group=Group.AWS,
        commands=("deploy",),
    )
    prices: str = declare(
        text(metavar="FILE"),
        "",
        "JSON file with prices per hour.",
        group=Group.OUTPUT,
        commands=("refresh", "report", "dashboard", "budget"),
        default_text="the price list of the package",
    )
    log_format: str = declare(
        choice(("text", "json")),
        "text",
        "Format of log lines on stderr. Agents use it too.",
        group=Group.OUTPUT,
        commands=ALL_COMMANDS,
        is_input=False,
        is_parameter=True,
    )

    boot_delay_sec: float = declare(_seconds(0, 600), 0.0, "Seconds that an instance takes to boot.", group=Group.LOCAL)
    fault: str = declare(text(), "", "Failure to simulate, such as never-boots.", group=Group.LOCAL)

    def given(self, name: str) -> bool:
        """Whether the value comes from a flag, a variable or the file."""
        return name in self.origins

    def shown(self, name: str) -> str:
        """The name of the setting as the user wrote it."""
        return shown_name(name, self.origins)

    @property
    def lifetimes(self) -> Lifetimes:
        values = {name: getattr(self, setting) for name, setting in LIFETIME_SETTINGS.items()}
        margin_s = self.margin_sec or (LOCAL_MARGIN_S if self.backend == "local" else AWS_MARGIN_S)
        return Lifetimes(**values | {"max_runtime_s": self.max_runtime_min * 60, "margin_s": margin_s})

    @property
    def scale_down_policy(self) -> ScaleDownPolicy:
        return ScaleDownPolicy(
            windows=self.idle_config,
            minimum_min=self.minimum_running_time_in_minutes,
            boot_min=self.runner_boot_time_in_minutes,
            idle_scope=self.idle_scope,
            max_removals=self.max_removals_per_cycle,
        )

    def launch_options(self) -> dict[str, str]:
        """Options for the compute adapter; the pool stores them. Empty ones are left out."""
        if self.backend == "aws":
            options = {item.key: str(getattr(self, item.name)) for item in SETTINGS.values() if item.is_launch_option}
        else:
            options = {
                "boot-delay-s": f"{self.boot_delay_sec:g}" if self.boot_delay_sec else "",
                "pre-runner-script": self.pre_runner_script,
                "fault": self.fault,
            }
        return {name: value for name, value in options.items() if value}


def _lifetime_setting(name: str) -> str:
    if name == "max_runtime_s":
        return "max_runtime_min"
    return f"{name}ec" if name.endswith("_s") else name


#: Settings that the pool's configuration has under the same name.
POOL_SETTINGS = ("max_instances", "reuse", "runner_sets", "runner_group", "monthly_budget")
#: Settings by the fields of `Lifetimes` that they set.
LIFETIME_SETTINGS: Mapping[str, str] = {item.name: _lifetime_setting(item.name) for item in fields(Lifetimes)}

SETTINGS: Mapping[str, Setting] = {
    item.name: replace(item.metadata["setting"], name=item.name) for item in fields(Settings) if item.metadata
}


def shown_name(name: str, origins: Mapping[str, str]) -> str:
    """The setting in the user's words: its source, or else its flag, or its variable if it has no flag."""
    if name in origins:
        return origins[name].removeprefix("file: ")
    # Flags of `deploy` alone do not count: the other commands do not have them.
    return variable(name) if name in SETTINGS and not set(SETTINGS[name].commands) - {"deploy"} else flag(name)
