"""Launch options of the AWS backend, validated before any call."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import urlsplit

from remuda.domain import runner_release
from remuda.domain.errors import UserError
from remuda.domain.resources import IMAGE, MAX_SHOWN, Architecture
from remuda.domain.runner_release import RunnerChoice
from remuda.domain.text import quote

AMI = "ami"
SUBNETS = "subnet-ids"
SECURITY_GROUPS = "security-group-ids"
PROFILE = "iam-instance-profile"
KEY_NAME = "key-name"
VOLUME_SIZE = "volume-size-gib"
VOLUME_TYPE = "volume-type"
VOLUME_IOPS = "volume-iops"
VOLUME_THROUGHPUT = "volume-throughput"
VOLUME_KMS_KEY = "volume-kms-key"
SPOT_FALLBACK = "spot-fallback"
SCRIPT = "pre-runner-script"
AGENT_URL = "agent-url"
AGENT_SHA256 = "agent-sha256"
JOB_IMAGE_URL = "job-image-url"
JOB_IMAGE_SHA256 = "job-image-sha256"
CACHE_PATHS = "cache-paths"
CACHE_SIZE = "cache-size-gib"
MODULES = "kernel-modules"
ENVIRONMENT = "github-environment"
TAGS = "tags"
NAMES = (
    AMI,
    SUBNETS,
    SECURITY_GROUPS,
    PROFILE,
    KEY_NAME,
    VOLUME_SIZE,
    VOLUME_TYPE,
    VOLUME_IOPS,
    VOLUME_THROUGHPUT,
    VOLUME_KMS_KEY,
    SPOT_FALLBACK,
    SCRIPT,
    runner_release.VERSION,
    runner_release.SHA256,
    runner_release.URL,
    AGENT_URL,
    AGENT_SHA256,
    JOB_IMAGE_URL,
    JOB_IMAGE_SHA256,
    CACHE_PATHS,
    CACHE_SIZE,
    MODULES,
    ENVIRONMENT,
    TAGS,
)

#: EC2's limits.
MAX_SUBNETS = 50
MAX_GROUPS = 16
MAX_TAG_VALUE = 256
#: Own tags. EC2 permits 50 on a resource, and Remuda, terraform-aws-github-runner and CloudFormation set some.
MAX_TAGS = 30
MAX_CACHE_PATHS = 8
MAX_MODULES = 16
#: Instead of modules: jobs may load them.
ANY_MODULE = "any"
DEFAULT_CACHE_GIB = "20"
ON_DEMAND = "on-demand"
#: Prefix of an image that a Systems Manager parameter names.
SSM_PREFIX = "resolve:ssm:"
#: Size of a root volume in GiB, unless the image needs a larger one: stock images have about 8 GiB.
DEFAULT_VOLUME_GIB = 30
DEFAULT_VOLUME_TYPE = "gp3"


class _VolumeLimits(NamedTuple):
    """Limits of a volume type, as in EC2's API reference of LaunchTemplateEbsBlockDeviceRequest."""

    gib: tuple[int, int]
    #: None if the type has no such option.
    iops: tuple[int, int] | None = None
    #: MiB/s.
    throughput: tuple[int, int] | None = None
    #: Types without a default require the option.
    needs_iops: bool = False
    #: Maximum IOPS per GiB, as in the Amazon EBS User Guide, "Amazon EBS volume types". The least number of IOPS is
    #: permitted for any size.
    iops_per_gib: int = 0


#: Volume types of root volumes.
VOLUME_TYPES = {
    "gp3": _VolumeLimits((1, 65_536), (3_000, 80_000), (125, 2_000), iops_per_gib=500),
    "gp2": _VolumeLimits((1, 16_384)),
    "io1": _VolumeLimits((4, 16_384), (100, 64_000), needs_iops=True, iops_per_gib=50),
    "io2": _VolumeLimits((4, 65_536), (100, 256_000), needs_iops=True, iops_per_gib=1_000),
}
#: IOPS that a gp3 volume needs per MiB/s of throughput.
IOPS_PER_THROUGHPUT = 4

_HEX_ID = "[0-9a-f]{8,17}"
_SUBNET = re.compile(rf"subnet-{_HEX_ID}")
_GROUP = re.compile(rf"sg-{_HEX_ID}")
_PROFILE_NAME = re.compile(r"[A-Za-z0-9+=,.@_-]{1,128}")
_PROFILE_ARN = re.compile(r"arn:[a-z-]+:iam::[0-9]{12}:instance-profile/[!-~]{1,512}")
_KEY_NAME = re.compile(r"[ -~]{1,255}")
#: The ARN, because policies can name only that.
_KMS_KEY = re.compile(r"arn:[a-z-]+:kms:[a-z0-9-]+:[0-9]{12}:key/[A-Za-z0-9-]{1,128}")
_NUMBER = re.compile(r"[0-9]{1,9}")
#: Keys that tags in the instance metadata permit ("View tags for your EC2 instances using instance metadata" in the EC2
#: User Guide), without the separators of the setting.
_TAG_KEY = re.compile(r"[A-Za-z0-9+.:@_-]{1,128}")
_TAG_VALUE = re.compile(rf"[A-Za-z0-9 +.:@_/=-]{{0,{MAX_TAG_VALUE}}}")
#: Prefixes of tags that others set: AWS, Remuda, and terraform-aws-github-runner.
_TAG_PREFIXES = ("aws:", "remuda:", "ghr:")
#: Names that are paths of the instance metadata.
_TAG_PATHS = frozenset({".", "..", "_index"})
_ENVIRONMENT = re.compile(r"[A-Za-z0-9 +=.,_:/@-]{1,256}")
#: A folder of a sandbox. Not a top-level one, and without `..`.
_CACHE_PATH = re.compile(r"(?:/[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}|/\.[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}){2,8}")
#: Folders of sandboxes that must not be covered: those of the kernel, the system and the agent.
_RESERVED = ("/dev", "/etc", "/opt/remuda", "/proc", "/run", "/sys")
#: Holds the job's work folder.
_JOB_HOME = "/home/runner"
#: The kernel's limit is MODULE_NAME_LEN.
_MODULE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,54}")
_CACHE_SIZE = re.compile(r"[1-9][0-9]{0,4}")
_URL = re.compile(r"[!-~]{1,2000}")


@dataclass(frozen=True, kw_only=True, slots=True)
class RootVolume:
    """The root volume of the instances. It is always encrypted."""

    #: None: the default, or the size of the image if that is larger.
    gib: int | None = None
    type: str = DEFAULT_VOLUME_TYPE
    #: None: EC2's default.
    iops: int | None = None
    throughput: int | None = None
    #: ARN, or empty for the account's default key.
    kms_key: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentBundle:
    """The archive of the agent for one architecture."""

    architecture: Architecture
    url: str
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Ec2LaunchOptions:
    ami: str
    subnets: tuple[str, ...]
    security_groups: tuple[str, ...] = ()
    #: A name or an ARN.
    profile: str
    key_name: str = ""
    volume: RootVolume = RootVolume()
    #: Launch on-demand instances for missing spot capacity.
    falls_back: bool = False
    script: str = ""
    #: The actions runner.
    runner: RunnerChoice
    #: One bundle per architecture; none if the image has the agent.
    agents: tuple[AgentBundle, ...] = ()
    #: The root file system of jobs, instead of the machine's.
    job_image_url: str = ""
    job_image_sha256: str = ""
    #: Folders that are kept per repository and tier.
    cache_paths: tuple[str, ...] = ()
    cache_gib: str = DEFAULT_CACHE_GIB
    #: Kernel modules, or `ANY_MODULE` alone.
    modules: tuple[str, ...] = ()
    #: Value of the tag `ghr:environment`.
    environment: str = ""
    #: Own tags of instances, volumes, network interfaces, fleets and the launch template.
    tags: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, launch: Mapping[str, str]) -> Ec2LaunchOptions:
        for name in launch:
            if name not in NAMES:
                raise UserError(
                    f"unknown launch option {name!r} of the aws backend", field=name, fix=f"use {', '.join(NAMES)}"
                )
        options = cls(
            ami=_required(launch, AMI, IMAGE, "set an image such as ami-0123456789abcdef0, or resolve:ssm:NAME"),
            subnets=_ids(launch, SUBNETS, _SUBNET, MAX_SUBNETS, "subnet-0123456789abcdef0"),
            security_groups=_ids(launch, SECURITY_GROUPS, _GROUP, MAX_GROUPS, "sg-0123456789abcdef0", required=False),
            profile=_profile(launch),
            key_name=_optional(launch, KEY_NAME, _KEY_NAME, "set the name of a key pair of this region"),
            volume=_volume(launch),
            falls_back=_fallback(launch),
            script=_script(launch),
            runner=RunnerChoice.parse(launch),
            agents=_agents(launch),
            job_image_url=_url(launch, JOB_IMAGE_URL, (".tar", ".tar.gz", ".tar.xz")),
            job_image_sha256=_sha256(launch, JOB_IMAGE_SHA256),
            cache_paths=_cache_paths(launch),
            cache_gib=_optional(launch, CACHE_SIZE, _CACHE_SIZE, "set a number of GiB such as 20") or DEFAULT_CACHE_GIB,
            modules=_modules(launch),
            environment=_optional(launch, ENVIRONMENT, _ENVIRONMENT, f"use at most {MAX_TAG_VALUE} letters and digits"),
            tags=parse_tags(launch.get(TAGS, "")),
        )
        options.check_downloads()
        return options

    def check_downloads(self) -> None:
        """Reject downloads without a digest: their content runs as root."""
        pairs = (
            *((AGENT_URL, each.url, AGENT_SHA256, each.sha256) for each in self.agents),
            (JOB_IMAGE_URL, self.job_image_url, JOB_IMAGE_SHA256, self.job_image_sha256),
        )
        for name, value, needed, given in pairs:
            if value and not given:
                raise UserError(f"{name} {value[:MAX_SHOWN]!r} needs {needed}", field=needed, fix=f"set {needed} too")


def _invalid(name: str, value: str, fix: str) -> UserError:
    message = f"{name} is invalid: {value[:MAX_SHOWN]!r}" if value else f"{name} is missing"
    return UserError(message, field=name, fix=fix)


def _required(launch: Mapping[str, str], name: str, pattern: re.Pattern[str], fix: str) -> str:
    value = launch.get(name, "").strip()
    if not pattern.fullmatch(value):
        raise _invalid(name, value, fix)
    return value


def _optional(launch: Mapping[str, str], name: str, pattern: re.Pattern[str], fix: str) -> str:
    return _required(launch, name, pattern, fix) if launch.get(name, "").strip() else ""


def _ids(
    launch: Mapping[str, str], name: str, pattern: re.Pattern[str], maximum: int, example: str, *, required: bool = True
) -> tuple[str, ...]:
    """Ids or paths separated by commas or blanks, without duplicates."""
    words = tuple(dict.fromkeys(launch.get(name, "").replace(",", " ").split()))
    fix = f"set 1 to {maximum} values such as {example}, separated by commas"
    if not words and required:
        raise _invalid(name, "", fix)
    for word in words:
        if not pattern.fullmatch(word):
            raise _invalid(name, word, fix)
    if len(words) > maximum:
        raise UserError(f"{name} has {len(words)} values", field=name, fix=fix)
    return words


def _cache_paths(launch: Mapping[str, str]) -> tuple[str, ...]:
    paths = _ids(launch, CACHE_PATHS, _CACHE_PATH, MAX_CACHE_PATHS, "/home/runner/.cache", required=False)
    for path in paths:
        if path == _JOB_HOME or any(_is_below(path, reserved) for reserved in _RESERVED):
            raise _invalid(CACHE_PATHS, path, f"use folders outside {', '.join(_RESERVED)}, and not {_JOB_HOME} itself")
        outer = next((other for other in paths if other != path and _is_below(path, other)), "")
        if outer:
            raise UserError(
                f"{CACHE_PATHS} has {path!r}, which is part of {outer!r}",
                field=CACHE_PATHS,
                fix="leave one of them out",
            )
    return paths


def _modules(launch: Mapping[str, str]) -> tuple[str, ...]:
    modules = _ids(launch, MODULES, _MODULE, MAX_MODULES, "sch_netem", required=False)
    if ANY_MODULE in modules and len(modules) > 1:
        fix = f"give {ANY_MODULE} alone, or names"
        raise UserError(f"{MODULES} has {ANY_MODULE!r} and names of modules", field=MODULES, fix=fix)
    return modules


def _is_below(path: str, folder: str) -> bool:
    return f"{path}/".startswith(f"{folder}/")


def _profile(launch: Mapping[str, str]) -> str:
    fix = "set the name or the ARN of the agents' instance profile"
    value = launch.get(PROFILE, "").strip()
    return _required(launch, PROFILE, _PROFILE_ARN if value.startswith("arn:") else _PROFILE_NAME, fix)


def _volume(launch: Mapping[str, str]) -> RootVolume:
    kind = launch.get(VOLUME_TYPE, "").strip() or DEFAULT_VOLUME_TYPE
    if kind not in VOLUME_TYPES:
        raise _invalid(VOLUME_TYPE, kind, f"use {', '.join(VOLUME_TYPES)}")
    limits = VOLUME_TYPES[kind]
    volume = RootVolume(
        gib=_volume_number(launch, VOLUME_SIZE, kind, limits.gib),
        type=kind,
        iops=_volume_number(launch, VOLUME_IOPS, kind, limits.iops),
        throughput=_volume_number(launch, VOLUME_THROUGHPUT, kind, limits.throughput),
        kms_key=_optional(
            launch, VOLUME_KMS_KEY, _KMS_KEY, "set the ARN of a KMS key: arn:aws:kms:REGION:ACCOUNT:key/ID"
        ),
    )
    if limits.iops and limits.needs_iops and volume.iops is None:
        least, most = limits.iops
        raise UserError(
            f"{VOLUME_TYPE} {kind} needs {VOLUME_IOPS}", field=VOLUME_IOPS, fix=f"set an integer from {least} to {most}"
        )
    if limits.iops:
        _check_ratios(volume, limits.iops[0], limits.iops_per_gib)
    return volume


def _check_ratios(volume: RootVolume, least_iops: int, iops_per_gib: int) -> None:
    """Reject performance that EC2 does not provide for the size of the volume."""
    gib = volume.gib or DEFAULT_VOLUME_GIB
    most_iops = max(least_iops, gib * iops_per_gib)
    iops = volume.iops or least_iops
    if iops > most_iops:
        raise UserError(
            f"{VOLUME_IOPS} is {iops}, but volumes of type {volume.type} with {gib} GiB have at most {most_iops}",
            field=VOLUME_IOPS,
            fix=f"set {VOLUME_IOPS} to at most {most_iops}, or {VOLUME_SIZE} to at least {-(-iops // iops_per_gib)}",
        )
    most_throughput = iops // IOPS_PER_THROUGHPUT
    if volume.throughput is not None and volume.throughput > most_throughput:
        needed = volume.throughput * IOPS_PER_THROUGHPUT
        raise UserError(
            f"{VOLUME_THROUGHPUT} is {volume.throughput}, but volumes with {iops} IOPS have at most {most_throughput}",
            field=VOLUME_THROUGHPUT,
            fix=f"set {VOLUME_THROUGHPUT} to at most {most_throughput}, or {VOLUME_IOPS} to at least {needed}",
        )


def _volume_number(
    launch: Mapping[str, str], name: str, volume_type: str, limits: tuple[int, int] | None
) -> int | None:
    value = launch.get(name, "").strip()
    if not value:
        return None
    if limits is None:
        raise UserError(
            f"{name} is {value[:MAX_SHOWN]!r}, but volumes of type {volume_type} have no such option",
            field=name,
            fix=f"remove {name}, or set another {VOLUME_TYPE}",
        )
    least, most = limits
    if not _NUMBER.fullmatch(value) or not least <= int(value) <= most:
        raise _invalid(name, value, f"set an integer from {least} to {most} for volumes of type {volume_type}")
    return int(value)


def _fallback(launch: Mapping[str, str]) -> bool:
    value = launch.get(SPOT_FALLBACK, "").strip()
    if value not in {"", "none", ON_DEMAND}:
        raise _invalid(SPOT_FALLBACK, value, f"use {ON_DEMAND} or none")
    return value == ON_DEMAND


def _script(launch: Mapping[str, str]) -> str:
    script = launch.get(SCRIPT, "")
    if "\0" in script:
        raise UserError(f"{SCRIPT} is not text", field=SCRIPT, fix="set the text of a shell script")
    return script


def _agents(launch: Mapping[str, str]) -> tuple[AgentBundle, ...]:
    urls = runner_release.by_architecture(
        launch, AGENT_URL, runner_release.URL_HINT, runner_release.is_package_url, Architecture
    )
    digests = runner_release.by_architecture(
        launch, AGENT_SHA256, runner_release.DIGEST_HINT, runner_release.is_digest, Architecture
    )
    return tuple(AgentBundle(architecture=name, url=url, sha256=digests.get(name, "")) for name, url in urls.items())


def _sha256(launch: Mapping[str, str], name: str) -> str:
    return _optional(launch, name, runner_release.DIGEST, "set the SHA-256 of the file: 64 digits 0-9, a-f")


def _url(launch: Mapping[str, str], name: str, endings: tuple[str, ...]) -> str:
    value = launch.get(name, "").strip()
    if not value:
        return ""
    fix = f"set an https:// or s3:// URL that ends in {' or '.join(endings)}, without a user or a query"
    try:
        parts = urlsplit(value)
    except ValueError:
        raise _invalid(name, value, fix) from None
    is_plain = not parts.query and not parts.fragment and "@" not in parts.netloc
    # The URL becomes part of the launch template, which many can read, so it must not contain a credential.
    if (
        parts.scheme not in {"https", "s3"}
        or not parts.netloc
        or not is_plain
        or not value.endswith(endings)
        or not _URL.fullmatch(value)
    ):
        shown = value if is_plain else f"{parts.scheme}://…"
        raise _invalid(name, shown, fix)
    return value


def parse_tags(text: str) -> dict[str, str]:
    """Own tags of everything that is created on AWS. Example: `team=ci,cost-center=42`."""
    found: dict[str, str] = {}
    for pair in filter(None, map(str.strip, text.split(","))):
        name, given, value = pair.partition("=")
        shown = quote(pair, MAX_SHOWN)
        if not given:
            raise UserError(f"{TAGS} has {shown}, which is no pair", field=TAGS, fix="give KEY=VALUE,KEY=VALUE")
        # AWS reserves its prefix in any letter case.
        if name.lower().startswith(_TAG_PREFIXES):
            fix = f"choose a key that does not begin with {', '.join(_TAG_PREFIXES)}"
            raise UserError(f"{TAGS} has {shown}, whose key is reserved", field=TAGS, fix=fix)
        if not _TAG_KEY.fullmatch(name) or name in _TAG_PATHS or not _TAG_VALUE.fullmatch(value):
            fix = f"use letters, digits and +.:@_-, in values also /, = and spaces, up to {MAX_TAG_VALUE}"
            raise UserError(f"{TAGS} has {shown}, which is not valid", field=TAGS, fix=fix)
        if name in found:
            raise UserError(f"{TAGS} has the key {name} twice", field=TAGS, fix="give it once")
        found[name] = value
    if len(found) > MAX_TAGS:
        raise UserError(f"{TAGS} has {len(found)} tags", field=TAGS, fix=f"give at most {MAX_TAGS}")
    return found
