"""The only reader of the environment and of remuda.toml.

A value comes from a flag, else from an environment variable, else from the file, else from its default; where each one
came from is kept. `--idle-time-sec`, `REMUDA_IDLE_TIME_SEC` and `idle-time-sec` are the same setting.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import tzinfo
from pathlib import Path
from typing import Any, Literal, NoReturn
from urllib.parse import urlsplit
from zoneinfo import ZoneInfo, available_timezones

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, ValidationInfo, field_validator

from remuda.domain.errors import UserError
from remuda.domain.resources import (
    DEFAULT_CLASSES,
    MAX_SHOWN,
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
from remuda.domain.scale_down.decisions import BOOT_MIN, IdleScope, ScaleDownPolicy
from remuda.domain.scale_down.idle_config import EXAMPLE as IDLE_CONFIG_EXAMPLE
from remuda.domain.scale_down.idle_config import FIX as IDLE_CONFIG_FIX
from remuda.domain.scale_down.idle_config import IdleWindow, parse_idle_config
from remuda.domain.text import quote
from remuda.domain.thresholds import Lifetimes

FILE_NAME = "remuda.toml"
MAX_SCRIPT = 10_000
MAX_TAG = 256
DAY_S = 86_400.0
#: GitHub's tokens live an hour and are renewed when ten minutes of it are gone: one must outlive a provision.
MAX_PROVISION_S = 2_400.0
LOCAL_MARGIN_S = 1.0
AWS_MARGIN_S = 60.0

#: What GitHub Actions sets by itself in a workflow, and what terraform-aws-github-runner gives to its scale-down.
OTHER_VARIABLES = {
    "run_id": "GITHUB_RUN_ID",
    "run_attempt": "GITHUB_RUN_ATTEMPT",
    "github_scope": "GITHUB_REPOSITORY",
    "repository": "GITHUB_REPOSITORY",
    "event_name": "GITHUB_EVENT_NAME",
    "event_path": "GITHUB_EVENT_PATH",
    "github_api_url": "GITHUB_API_URL",
    "environment": "ENVIRONMENT",
    "idle_config": "SCALE_DOWN_CONFIG",
    "minimum_running_time_in_minutes": "MINIMUM_RUNNING_TIME_IN_MINUTES",
    "runner_boot_time_in_minutes": "RUNNER_BOOT_TIME_IN_MINUTES",
}
#: The settings of scale-down, which have a table of their own in the file.
SCALE_DOWN_TABLE = "scale_down"
SCALE_DOWN = (
    "environment",
    "idle_config",
    "minimum_running_time_in_minutes",
    "runner_boot_time_in_minutes",
    "idle_scope",
    "max_removals_per_cycle",
)

#: Settings that the EC2 adapter takes as they are.
AWS_LAUNCH = (
    "ami",
    "subnet_ids",
    "security_group_ids",
    "iam_instance_profile",
    "key_name",
    "spot_fallback",
    "pre_runner_script",
    "actions_runner_version",
    "actions_runner_sha256",
    "actions_runner_url",
    "agent_url",
    "agent_sha256",
    "python_url",
    "python_sha256",
    "github_environment",
)

_HEADER_TEXT = re.compile(r"[!-~]*")
_POOL_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,19}")
_SECRET_ARN = re.compile(r"arn:[a-z-]+:secretsmanager:[a-z0-9-]+:[0-9]{12}:secret:[A-Za-z0-9/_+=.@!-]{1,519}")
_PEM = "-----BEGIN"
#: Settings that may name a secret in place of being one.
_MAY_NAME_A_SECRET = ("github_token", "github_app_key")


def _seconds(default: float, least: float, most: float, what: str) -> Any:
    return Field(
        default=default,
        ge=least,
        le=most,
        allow_inf_nan=False,
        description=what,
        json_schema_extra={"fix": f"give seconds from {least:g} to {most:g}"},
    )


def _whole(default: int, least: int, most: int, what: str) -> Any:
    return Field(
        default=default,
        ge=least,
        le=most,
        description=what,
        json_schema_extra={"fix": f"give a whole number from {least} to {most}"},
    )


def _minutes(default: float | None, what: str) -> Any:
    return Field(
        default=default,
        ge=0,
        le=7 * 1_440,
        allow_inf_nan=False,
        description=what,
        json_schema_extra={"fix": "give minutes from 0 to 10080"},
    )


def is_secret_arn(value: str) -> bool:
    """Whether it names a secret of Secrets Manager."""
    return _SECRET_ARN.fullmatch(value) is not None


def read_key(value: str) -> str:
    """An App's private key: the text itself, or what the file of that name holds. Neither is ever quoted."""
    if not value or _PEM in value:
        return value
    try:
        text = Path(value).expanduser().read_text(encoding="ascii")
    except (OSError, ValueError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UserError(
            f"github-app-key is no PEM text, and no file that can be read: {reason}",
            field=variable("github_app_key"),
            fix="give PEM text, the path of a PEM file, or the ARN of a secret",
        ) from None
    if _PEM not in text:
        raise UserError(
            "github-app-key names a file that is not PEM",
            field=variable("github_app_key"),
            fix="give the path of the private key as GitHub made it (.pem)",
        )
    return text


def _is_address(text: str) -> bool:
    try:
        parts = urlsplit(text)
        # Looking at the port checks it.
        return parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0 and text.isprintable()
    except ValueError:
        return False


def _from_json(value: Any, *, field: str, fix: str) -> Any:
    """A setting that the file may have as a table; elsewhere it is text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{field} is not JSON: {error}", field=field, fix=fix) from None


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


class Settings(BaseModel):
    """Every setting, with its default."""

    model_config = ConfigDict(extra="forbid", frozen=True, arbitrary_types_allowed=True)

    backend: Literal["local", "aws"] = Field(
        default="local",
        description="Where instances live.",
        json_schema_extra={"fix": "use local or aws"},
    )
    dir: Path = Field(default=Path(".remuda"), description="State folder of the local backend.")
    pool: str = Field(default="default", description="Name of the pool.")

    github_scope: str = Field(default="remuda/demo", description="Organisation or owner/repo that runners register in.")
    github_token: SecretStr | None = Field(
        default=None, description="Credential for GitHub: a token, or the ARN of a secret of Secrets Manager."
    )
    github_api_url: str = Field(default="", description="GitHub's API; the local backend has its own.")

    run_id: str = Field(default="", description="The workflow's run id: label of its runners.")
    run_attempt: int = _whole(1, 1, 1_000_000, "The workflow's attempt.")
    instance_count: int = _whole(1, 1, 1_000, "How many runners.")
    resource_class: str = Field(default="large", description="Class of the runners.")
    usage_class: UsageClass = Field(
        default=UsageClass.ON_DEMAND,
        description="spot or on-demand.",
        json_schema_extra={"fix": "use spot or on-demand"},
    )
    allowed_instance_types: TypePatterns = Field(
        default=TypePatterns(("*",)), description="Instance types, such as 'c* m6i.large'."
    )
    tier: Tier = Field(
        default=Tier.TRUSTED,
        description="How far the run's code is trusted: may be lower than the event says, never higher.",
        json_schema_extra={"fix": "use trusted or untrusted"},
    )
    repository: str = Field(
        default="", description="The run's repository, owner/name (default: GITHUB_REPOSITORY, or the scope)."
    )
    event_name: str = Field(default="", description="The event that started the run (default: GITHUB_EVENT_NAME).")
    event_path: str = Field(default="", description="The file that tells about it (default: GITHUB_EVENT_PATH).")
    ephemeral: bool = Field(
        default=False,
        description="New instances for one job each, registered just in time; on AWS it needs a GitHub credential.",
        json_schema_extra={"fix": "use true or false"},
    )

    max_runtime_min: float = Field(
        default=30.0,
        ge=0.05,
        le=7 * 1_440,
        allow_inf_nan=False,
        description="How long a run may keep its runners, in minutes.",
        json_schema_extra={"fix": "give minutes from 0.05 to 10080"},
    )
    idle_time_sec: float = _seconds(420, 1, 7 * DAY_S, "How long an idle instance stays in the pool.")
    release_time_sec: float = _seconds(300, 5, DAY_S, "How long a release may take.")
    provision_timeout_sec: float = _seconds(300, 2, MAX_PROVISION_S, "By when a provision must be complete.")
    max_age_sec: float = _seconds(86_400, 10, 365 * DAY_S, "Beyond this age an instance is not pooled again.")
    max_uses: int = _whole(50, 1, 100_000, "After so many uses an instance is not pooled again.")
    reuse: Reuse = Field(
        default=Reuse.SAME_TRUST,
        description="Whose machines a run may be given: always, same-repo, same-trust or never.",
        json_schema_extra={"fix": "use always, same-repo, same-trust or never"},
    )
    max_instances: int = _whole(100, 1, 100_000, "How many instances the pool may have.")
    margin_sec: float | None = Field(
        default=None,
        ge=0.1,
        le=3_600,
        allow_inf_nan=False,
        description="What clocks may differ by (local 1, aws 60).",
        json_schema_extra={"fix": "give seconds from 0.1 to 3600"},
    )
    unrecorded_grace_sec: float = _seconds(300, 1, DAY_S, "How long a machine may lack a record.")
    ghost_grace_sec: float = _seconds(
        900,
        1,
        DAY_S,
        "How long a registration may lack a record and a machine; at least until a machine counts as gone.",
    )
    gone_after_sec: float = _seconds(60, 1, DAY_S, "A machine must be missing twice, so far apart, to be gone.")
    reannounce_sec: float = _seconds(600, 1, DAY_S, "An idle instance is announced again after so long.")
    keep_records_sec: float = _seconds(30 * DAY_S, 1, 3_650 * DAY_S, "How long records of ended instances are kept.")

    resource_class_config: tuple[ResourceClass, ...] = Field(
        default=DEFAULT_CLASSES, description='Own classes, as JSON: {"large": {"cpu": 2, "mmem": 4096}}.'
    )
    pre_runner_script: str = Field(
        default="", description="Shell script that each new machine runs first: text, or @FILE."
    )
    boot_delay_sec: float = _seconds(0, 0, 600, "Local backend: how long a machine takes to boot.")
    fault: str = Field(default="", description="Local backend: a failure to play, such as never-boots.")

    ami: str = Field(default="", description="AWS: image of the machines, an id or resolve:ssm:NAME.")
    subnet_ids: str = Field(default="", description="AWS: subnets to launch in.")
    security_group_ids: str = Field(default="", description="AWS: security groups of the machines.")
    iam_instance_profile: str = Field(default="", description="AWS: instance profile of the machines.")
    key_name: str = Field(default="", description="AWS: key pair of the machines.")
    spot_fallback: str = Field(default="", description="AWS: on-demand buys what spot cannot give.")
    actions_runner_version: str = Field(default="", description="AWS: version of the actions runner to install.")
    actions_runner_sha256: str = Field(default="", description="AWS: its digest.")
    actions_runner_url: str = Field(default="", description="AWS: a mirror to take it from.")
    agent_url: str = Field(default="", description="AWS: where machines get the agent, unless the image has it.")
    agent_sha256: str = Field(default="", description="AWS: its digest.")
    python_url: str = Field(default="", description="AWS: an interpreter for the agent.")
    python_sha256: str = Field(default="", description="AWS: its digest.")
    github_environment: str = Field(default="", description="AWS: value of the tag ghr:environment.")
    log_format: Literal["text", "json"] = Field(
        default="text",
        description="Logs: text for people, or a JSON line an event. Agents log the same way.",
        json_schema_extra={"fix": "use text or json"},
    )
    prices: str = Field(default="", description="Price table for reports, a JSON file (default: the one shipped).")
    github_app_id: str = Field(default="", description="GitHub App in place of a token.")
    github_app_key: SecretStr | None = Field(
        default=None, description="Its private key: PEM text, a file, or the ARN of a secret of Secrets Manager."
    )

    environment: str = Field(
        default="",
        description="Scale-down: value of the tag ghr:environment (default: github-environment, or the pool).",
    )
    idle_config: tuple[IdleWindow, ...] = Field(
        default=(), description=f"Scale-down: how many idle runners to keep and when, as JSON: {IDLE_CONFIG_EXAMPLE}."
    )
    minimum_running_time_in_minutes: float | None = _minutes(
        None, "Scale-down: a younger runner is kept (Linux 5, Windows 15)."
    )
    runner_boot_time_in_minutes: float = _minutes(
        BOOT_MIN, "Scale-down: a machine that is not on GitHub by then is an orphan."
    )
    idle_scope: IdleScope = Field(
        default=IdleScope.ENVIRONMENT,
        description="Scale-down: what an idle count counts for, environment or owner.",
        json_schema_extra={"fix": "use environment or owner"},
    )
    max_removals_per_cycle: int | None = Field(
        default=None,
        ge=0,
        le=100_000,
        description="Scale-down: how many runners one cycle may remove from GitHub (default: all).",
        json_schema_extra={"fix": "give a whole number from 0 to 100000"},
    )

    @field_validator("dir", mode="before")
    @classmethod
    def _check_dir(cls, value: Any) -> Any:
        """Before anything is made in it, or removed from it: an empty one would be the present folder."""
        if not isinstance(value, str):
            return value
        try:
            if value.strip() and "\0" not in value:
                Path(value).absolute().exists()
                return value
            reason = "it is no path"
        except OSError as error:
            reason = _reason(error)
        raise UserError(
            f"dir {value[:MAX_SHOWN]!r} cannot be used: {reason}", field="dir", fix="name a folder that you may write"
        )

    @field_validator("pool")
    @classmethod
    def _check_pool(cls, value: str) -> str:
        if not _POOL_NAME.fullmatch(value):
            raise UserError(
                f"pool is {value[:40]!r}", field="pool", fix="use up to 20 lower-case letters, digits and -"
            )
        return value

    @field_validator(*_MAY_NAME_A_SECRET)
    @classmethod
    def _check_arn(cls, value: SecretStr | None, info: ValidationInfo) -> SecretStr | None:
        """Told before any call is made. A token is no ARN: one that is mistyped would be sent to GitHub."""
        text = value.get_secret_value().strip() if value else ""
        if text.startswith("arn:") and not is_secret_arn(text):
            raise UserError(
                f"{info.field_name} is an ARN of something else than a secret",
                field=str(info.field_name),
                fix="give an ARN such as arn:aws:secretsmanager:REGION:ACCOUNT:secret:NAME",
            )
        return SecretStr(text) if value else None

    @field_validator("github_token")
    @classmethod
    def _check_token(cls, value: SecretStr | None) -> SecretStr | None:
        """It goes into a header."""
        if value is not None and not _HEADER_TEXT.fullmatch(value.get_secret_value()):
            raise UserError(
                "github-token holds characters that no token has",
                field="github-token",
                fix="give the token alone, without spaces or line breaks",
            )
        return value

    @field_validator("github_api_url")
    @classmethod
    def _check_api_url(cls, value: str) -> str:
        if value and not _is_address(value):
            raise UserError(
                f"github-api-url is {value[:MAX_SHOWN]!r}",
                field="github-api-url",
                fix="give an address such as https://HOST/api/v3",
            )
        return value

    @field_validator("github_scope")
    @classmethod
    def _check_scope(cls, value: str) -> str:
        return check_scope(value)

    @field_validator("repository")
    @classmethod
    def _check_repository(cls, value: str) -> str:
        return check_repository(value) if value else ""

    @field_validator("ephemeral", mode="before")
    @classmethod
    def _check_ephemeral(cls, value: Any) -> bool:
        """As text it comes from everywhere but the file."""
        if isinstance(value, bool):
            return value
        if not isinstance(value, str) or value not in {"true", "false"}:
            raise ValueError("use true or false")
        return value == "true"

    @field_validator("run_id", mode="before")
    @classmethod
    def _check_run_id(cls, value: Any) -> str:
        return check_run_id(str(value)) if value != "" else ""

    @field_validator("allowed_instance_types", mode="before")
    @classmethod
    def _parse_patterns(cls, value: Any) -> TypePatterns:
        if isinstance(value, TypePatterns):
            return value
        if not isinstance(value, str | list):
            raise ValueError("give words such as 'c* m6i.large'")
        return TypePatterns.parse(" ".join(map(str, value)) if isinstance(value, list) else str(value))

    @field_validator("resource_class_config", mode="before")
    @classmethod
    def _parse_classes(cls, value: Any) -> tuple[ResourceClass, ...]:
        if isinstance(value, tuple):
            return value
        fix = 'give JSON such as {"large": {"cpu": 2, "mmem": 4096}}'
        return parse_classes(_from_json(value, field="resource-class-config", fix=fix))

    @field_validator("environment")
    @classmethod
    def _check_environment(cls, value: str) -> str:
        """A tag's value; wildcards would make the filter find other fleets."""
        if len(value) > MAX_TAG or any(letter in value for letter in "*?\\") or not value.isprintable():
            raise UserError(
                f"environment is {value[:MAX_SHOWN]!r}",
                field="environment",
                fix=f"give the tag's value: up to {MAX_TAG} characters, without * and ?",
            )
        return value

    @field_validator("idle_config", mode="before")
    @classmethod
    def _parse_idle_config(cls, value: Any) -> tuple[IdleWindow, ...]:
        if isinstance(value, tuple):
            return value
        return parse_idle_config(_from_json(value, field="idle-config", fix=IDLE_CONFIG_FIX), zone_of=_zone)

    @field_validator("pre_runner_script")
    @classmethod
    def _read_script(cls, value: str) -> str:
        if value.startswith("@"):
            try:
                value = Path(value[1:]).read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                raise UserError(
                    f"pre-runner-script {value[:MAX_SHOWN]!r} cannot be read: {_reason(error)}",
                    field="pre-runner-script",
                    fix="give the text of a shell script, or @ and the path of one",
                ) from None
        if len(value) > MAX_SCRIPT:
            raise UserError(
                f"pre-runner-script is {len(value)} characters long",
                field="pre-runner-script",
                fix=f"keep it under {MAX_SCRIPT}; let it fetch what is longer",
            )
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_truth(cls, value: Any, info: ValidationInfo) -> Any:
        """Where a number is asked for, `true` in the file would pass as 1. The last one here: it is asked first."""
        if isinstance(value, bool) and info.field_name != "ephemeral":
            raise ValueError("this setting is not true or false")
        return value

    @property
    def lifetimes(self) -> Lifetimes:
        margin_s = self.margin_sec or (LOCAL_MARGIN_S if self.backend == "local" else AWS_MARGIN_S)
        return Lifetimes(
            provision_timeout_s=self.provision_timeout_sec,
            max_runtime_s=self.max_runtime_min * 60,
            idle_time_s=self.idle_time_sec,
            release_time_s=self.release_time_sec,
            max_age_s=self.max_age_sec,
            max_uses=self.max_uses,
            margin_s=margin_s,
            unrecorded_grace_s=self.unrecorded_grace_sec,
            ghost_grace_s=self.ghost_grace_sec,
            gone_after_s=self.gone_after_sec,
            reannounce_s=self.reannounce_sec,
            keep_records_s=self.keep_records_sec,
        )

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
        """What compute needs to know beyond the request."""
        if self.backend == "aws":
            named = {key(name): str(getattr(self, name)) for name in AWS_LAUNCH}
            return {name: value for name, value in named.items() if value}
        options = {
            "boot-delay-s": f"{self.boot_delay_sec:g}" if self.boot_delay_sec else "",
            "pre-runner-script": self.pre_runner_script,
            "fault": self.fault,
        }
        return {name: value for name, value in options.items() if value}


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    settings: Settings
    #: Where each value came from, in the user's words.
    origins: Mapping[str, str]

    def given(self, name: str) -> bool:
        return self.origins[name] != "default"

    def shown(self, name: str) -> str:
        """The setting as the user wrote it."""
        return _shown(name, self.origins)


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def variable(name: str) -> str:
    return "REMUDA_" + name.upper()


def key(name: str) -> str:
    return name.replace("_", "-")


def load(flags: Mapping[str, Any], *, environ: Mapping[str, str], file: Path | None = None) -> Loaded:
    """Merge and check. One sentence for the first thing that is wrong, before any call is made."""
    values: dict[str, Any] = {}
    origins: dict[str, str] = dict.fromkeys(Settings.model_fields, "default")
    for name, value in _from_file(file, environ).items():
        values[name], origins[name] = value, f"file: {key(name)}"
    for name in Settings.model_fields:
        for source in (OTHER_VARIABLES.get(name), variable(name)):
            if source and environ.get(source):
                values[name], origins[name] = environ[source], source
        if flags.get(name) is not None:
            values[name], origins[name] = flags[name], flag(name)
    try:
        settings = Settings(**values)
    except ValidationError as error:
        _refuse(error, origins)
    except UserError as error:
        field = error.field.replace("-", "_")
        raise UserError(error.message, field=_shown(field, origins), fix=error.fix) from None
    return Loaded(settings=settings, origins=origins)


def _from_file(file: Path | None, environ: Mapping[str, str]) -> dict[str, Any]:
    named = file or (Path(environ["REMUDA_CONFIG"]) if environ.get("REMUDA_CONFIG") else None)
    path = named or Path(FILE_NAME)
    if named is None and not path.exists():
        return {}
    fix = "mend it, or name another with --config"
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}", field="config", fix=fix) from None
    except (ValueError, RecursionError) as error:
        # Besides what is not TOML: bytes that are no text, numbers and nesting beyond what Python takes.
        raise UserError(f"{path} is not TOML: {error}", field="config", fix=fix) from None
    known = {key(name): name for name in Settings.model_fields}
    document |= _scale_down_table(path, document)
    for given in document:
        if given not in known:
            near = difflib.get_close_matches(given, known, n=1)
            hint = f"did you mean {near[0]}?" if near else "remuda config lists the settings"
            raise UserError(f"{path} has an unknown key {given[:MAX_SHOWN]!r}", field=given[:MAX_SHOWN], fix=hint)
    return {known[given]: value for given, value in document.items()}


def _scale_down_table(path: Path, document: dict[str, Any]) -> dict[str, Any]:
    """`[scale_down]` holds the same settings by the names that terraform-aws-github-runner has for them."""
    table = document.pop(SCALE_DOWN_TABLE, {})
    if not isinstance(table, dict):
        raise UserError(
            f"{path}: {SCALE_DOWN_TABLE} is no table", field=SCALE_DOWN_TABLE, fix=f"write [{SCALE_DOWN_TABLE}]"
        )
    for given in table:
        if given not in SCALE_DOWN:
            near = difflib.get_close_matches(given, SCALE_DOWN, n=1)
            raise UserError(
                f"{path} has an unknown key {given[:MAX_SHOWN]!r} in [{SCALE_DOWN_TABLE}]",
                field=f"{SCALE_DOWN_TABLE}.{given[:MAX_SHOWN]}",
                fix=f"did you mean {near[0]}?" if near else f"use {', '.join(SCALE_DOWN)}",
            )
    return {key(name): value for name, value in table.items()}


def _zone(name: str) -> tzinfo:
    """`ValueError` where there is none. As browsers do, whatever the case of the letters."""
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        for known in available_timezones():
            if known.lower() == name.lower():
                return ZoneInfo(known)
        raise ValueError(f"there is no time zone {name!r}") from None


def _shown(name: str, origins: Mapping[str, str]) -> str:
    origin = origins.get(name, "default")
    return flag(name) if origin == "default" else origin.removeprefix("file: ")


def _refuse(error: ValidationError, origins: Mapping[str, str]) -> NoReturn:
    first = error.errors(include_url=False)[0]
    name = str(first["loc"][0])
    schema = Settings.model_fields[name].json_schema_extra
    fix = str(schema["fix"]) if isinstance(schema, dict) and "fix" in schema else first["msg"]
    secret = name in {"github_token", "github_app_key"}
    shown = "(hidden)" if secret else quote(first["input"], MAX_SHOWN)
    raise UserError(f"{_shown(name, origins)} is {shown}", field=_shown(name, origins), fix=fix) from None
