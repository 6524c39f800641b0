"""Launch options of the AWS backend, validated before any call."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from remuda.domain import runner_release
from remuda.domain.errors import UserError
from remuda.domain.resources import MAX_SHOWN
from remuda.domain.runner_release import RunnerChoice

AMI = "ami"
SUBNETS = "subnet-ids"
SECURITY_GROUPS = "security-group-ids"
PROFILE = "iam-instance-profile"
KEY_NAME = "key-name"
SPOT_FALLBACK = "spot-fallback"
SCRIPT = "pre-runner-script"
AGENT_URL = "agent-url"
AGENT_SHA256 = "agent-sha256"
PYTHON_URL = "python-url"
PYTHON_SHA256 = "python-sha256"
JOB_IMAGE_URL = "job-image-url"
JOB_IMAGE_SHA256 = "job-image-sha256"
CACHE_PATHS = "cache-paths"
CACHE_SIZE = "cache-size-gib"
ENVIRONMENT = "github-environment"
NAMES = (
    AMI,
    SUBNETS,
    SECURITY_GROUPS,
    PROFILE,
    KEY_NAME,
    SPOT_FALLBACK,
    SCRIPT,
    runner_release.VERSION,
    runner_release.SHA256,
    runner_release.URL,
    AGENT_URL,
    AGENT_SHA256,
    PYTHON_URL,
    PYTHON_SHA256,
    JOB_IMAGE_URL,
    JOB_IMAGE_SHA256,
    CACHE_PATHS,
    CACHE_SIZE,
    ENVIRONMENT,
)

#: EC2's limits.
MAX_SUBNETS = 50
MAX_GROUPS = 16
MAX_TAG_VALUE = 256
MAX_CACHE_PATHS = 8
DEFAULT_CACHE_GIB = "20"
ON_DEMAND = "on-demand"

_HEX_ID = "[0-9a-f]{8,17}"
_AMI = re.compile(rf"ami-{_HEX_ID}|resolve:ssm:[A-Za-z0-9_./:-]{{1,500}}")
_SUBNET = re.compile(rf"subnet-{_HEX_ID}")
_GROUP = re.compile(rf"sg-{_HEX_ID}")
_PROFILE_NAME = re.compile(r"[A-Za-z0-9+=,.@_-]{1,128}")
_PROFILE_ARN = re.compile(r"arn:[a-z-]+:iam::[0-9]{12}:instance-profile/[!-~]{1,512}")
_KEY_NAME = re.compile(r"[ -~]{1,255}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_ENVIRONMENT = re.compile(r"[A-Za-z0-9 +=.,_:/@-]{1,256}")
#: A folder of a sandbox. Not a top-level one, and without `..`.
_CACHE_PATH = re.compile(r"(?:/[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}|/\.[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}){2,8}")
#: Folders of sandboxes that must not be covered: those of the kernel, the system and the agent.
_RESERVED = ("/dev", "/etc", "/opt/remuda", "/proc", "/run", "/sys")
#: Holds the job's work folder.
_JOB_HOME = "/home/runner"
_CACHE_SIZE = re.compile(r"[1-9][0-9]{0,4}")
_URL = re.compile(r"[!-~]{1,2000}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Ec2LaunchOptions:
    ami: str
    subnets: tuple[str, ...]
    security_groups: tuple[str, ...] = ()
    #: A name or an ARN.
    profile: str
    key_name: str = ""
    #: Launch on-demand instances for missing spot capacity.
    falls_back: bool = False
    script: str = ""
    #: The actions runner.
    runner: RunnerChoice
    agent_url: str = ""
    agent_sha256: str = ""
    python_url: str = ""
    python_sha256: str = ""
    #: The root file system of jobs, instead of the machine's.
    job_image_url: str = ""
    job_image_sha256: str = ""
    #: Folders that are kept per repository and tier.
    cache_paths: tuple[str, ...] = ()
    cache_gib: str = DEFAULT_CACHE_GIB
    #: Value of the tag `ghr:environment`.
    environment: str = ""

    @classmethod
    def parse(cls, launch: Mapping[str, str]) -> Ec2LaunchOptions:
        for name in launch:
            if name not in NAMES:
                raise UserError(
                    f"unknown launch option {name!r} of the aws backend", field=name, fix=f"use {', '.join(NAMES)}"
                )
        options = cls(
            ami=_required(launch, AMI, _AMI, "set an image such as ami-0123456789abcdef0, or resolve:ssm:NAME"),
            subnets=_ids(launch, SUBNETS, _SUBNET, MAX_SUBNETS, "subnet-0123456789abcdef0"),
            security_groups=_ids(launch, SECURITY_GROUPS, _GROUP, MAX_GROUPS, "sg-0123456789abcdef0", required=False),
            profile=_profile(launch),
            key_name=_optional(launch, KEY_NAME, _KEY_NAME, "set the name of a key pair of this region"),
            falls_back=_fallback(launch),
            script=_script(launch),
            runner=RunnerChoice.parse(launch),
            agent_url=_url(launch, AGENT_URL, (".whl", ".tar.gz")),
            agent_sha256=_sha256(launch, AGENT_SHA256),
            python_url=_url(launch, PYTHON_URL, (".tar.gz",)),
            python_sha256=_sha256(launch, PYTHON_SHA256),
            job_image_url=_url(launch, JOB_IMAGE_URL, (".tar", ".tar.gz", ".tar.xz")),
            job_image_sha256=_sha256(launch, JOB_IMAGE_SHA256),
            cache_paths=_cache_paths(launch),
            cache_gib=_optional(launch, CACHE_SIZE, _CACHE_SIZE, "set a number of GiB such as 20") or DEFAULT_CACHE_GIB,
            environment=_optional(launch, ENVIRONMENT, _ENVIRONMENT, f"use at most {MAX_TAG_VALUE} letters and digits"),
        )
        options.check_downloads()
        return options

    def check_downloads(self) -> None:
        """Reject downloads without a digest: their content runs as root."""
        pairs = (
            (AGENT_URL, self.agent_url, AGENT_SHA256, self.agent_sha256),
            (PYTHON_URL, self.python_url, PYTHON_SHA256, self.python_sha256),
            (JOB_IMAGE_URL, self.job_image_url, JOB_IMAGE_SHA256, self.job_image_sha256),
        )
        for name, value, needed, given in pairs:
            if value and not given:
                raise UserError(f"{name} {value[:MAX_SHOWN]!r} needs {needed}", field=needed, fix=f"set {needed} too")
        if self.agent_url.endswith(".whl") and not self.python_url:
            raise UserError(
                f"{AGENT_URL} {self.agent_url[:MAX_SHOWN]!r} is a wheel and needs a Python interpreter",
                field=PYTHON_URL,
                fix=f"set {PYTHON_URL} to a standalone Python 3.11 or newer (.tar.gz), and set {PYTHON_SHA256}",
            )


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


def _is_below(path: str, folder: str) -> bool:
    return f"{path}/".startswith(f"{folder}/")


def _profile(launch: Mapping[str, str]) -> str:
    fix = "set the name or the ARN of the agents' instance profile"
    value = launch.get(PROFILE, "").strip()
    return _required(launch, PROFILE, _PROFILE_ARN if value.startswith("arn:") else _PROFILE_NAME, fix)


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


def _sha256(launch: Mapping[str, str], name: str) -> str:
    return _optional(launch, name, _SHA256, "set the SHA-256 of the file: 64 digits 0-9, a-f")


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
