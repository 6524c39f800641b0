"""Settings of the smoke run, from the environment. Everything is checked before the first call."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from remuda.domain.errors import UserError
from remuda.domain.resources import is_repository
from remuda.domain.text import quote

PERMISSION = "REMUDA_SMOKE"
BUDGET = "REMUDA_SMOKE_BUDGET_USD"
REPOSITORY = "REMUDA_SMOKE_REPOSITORY"
BUNDLES = "REMUDA_SMOKE_BUNDLES"
TOKEN = "REMUDA_GITHUB_TOKEN"
#: More is a mistake: the run costs a few dollars.
MAX_BUDGET_USD = 100.0
MAX_SHOWN = 80


@dataclass(frozen=True, kw_only=True, slots=True)
class SmokeSettings:
    budget_usd: float
    #: owner/name of a repository that the run may push branches to.
    repository: str
    token: str = field(repr=False)
    region: str
    #: Folder of `make dist`.
    bundles: Path


def read_settings(environment: Mapping[str, str]) -> SmokeSettings:
    if environment.get(PERMISSION) != "yes":
        raise UserError(
            f"this creates machines and more in your AWS account, which costs money; set {PERMISSION}=yes to permit it",
            field=PERMISSION,
        )
    return SmokeSettings(
        budget_usd=_budget(environment.get(BUDGET, "")),
        repository=_repository(environment.get(REPOSITORY, "")),
        token=_required(environment, TOKEN, "a token that may administer runners, contents and workflows of it"),
        region=_required(environment, "AWS_REGION", "a region, such as us-east-1"),
        bundles=_bundles(environment.get(BUNDLES) or "dist"),
    )


def _required(environment: Mapping[str, str], name: str, what: str) -> str:
    value = environment.get(name, "").strip()
    if not value:
        raise UserError(f"{name} is not set", field=name, fix=f"set {name} to {what}")
    return value


def _budget(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= MAX_BUDGET_USD:
        raise UserError(
            f"{BUDGET} must be a number of US dollars from 0 to {MAX_BUDGET_USD:g}, got {quote(text, MAX_SHOWN)}",
            field=BUDGET,
            fix=f"set {BUDGET} to what the run may cost at most",
        )
    return value


def _repository(text: str) -> str:
    if not is_repository(text):
        raise UserError(
            f"{REPOSITORY} must be owner/name, got {quote(text, MAX_SHOWN)}",
            field=REPOSITORY,
            fix="name a repository for tests; the run pushes branches with workflows to it",
        )
    return text


def _bundles(text: str) -> Path:
    folder = Path(text)
    if not (folder / "SHA256SUMS").is_file():
        raise UserError(
            f"{quote(text, MAX_SHOWN)} has no SHA256SUMS", field=BUNDLES, fix=f"run 'make dist', or set {BUNDLES}"
        )
    return folder
