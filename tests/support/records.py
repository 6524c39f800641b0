"""Builders of valid records, whose fields tests override by keyword."""

from __future__ import annotations

from dataclasses import fields
from datetime import datetime, timedelta
from typing import Any

from remuda.domain.instance import Assignment, Credential, HistoryEntry, Instance, State
from remuda.domain.pool_config import PoolConfig, ScopeTokens
from remuda.domain.provision import Provision
from remuda.domain.resources import DEFAULT_CLASSES, PoolMessage, UsageClass
from remuda.domain.thresholds import Lifetimes
from remuda.domain.transitions import Actor, Change, Claim, WriteCondition, advance
from simulation.loop import START

#: Seconds to wait for an event that must happen. Generous: only a broken test reaches it.
LONG_S = 60.0
#: Seconds to wait for an event that must not happen.
SHORT_S = 0.05

NOW = START


def at(seconds: float) -> datetime:
    """The time `seconds` after NOW."""
    return NOW + timedelta(seconds=seconds)


def instance_id(number: int) -> str:
    return f"i-{number:017x}"


def instance(number: int = 1, **changed: Any) -> Instance:
    values: dict[str, Any] = {
        "instance_id": instance_id(number),
        "state": State.IDLE,
        "epoch": 1,
        "threshold": at(420),
        "resource_class": "large",
        "instance_type": "c6i.large",
        "usage_class": UsageClass.ON_DEMAND,
        "cpu": 2,
        "memory_mib": 4_096,
        "created_at": NOW,
    }
    return Instance(**{**values, **changed})


def entry(transition: str = "test", **changed: Any) -> HistoryEntry:
    values: dict[str, Any] = {
        "at": NOW,
        "transition": transition,
        "source": State.IDLE,
        "target": State.IDLE,
        "epoch": 1,
        "run_id": "",
        "by": Actor.REFRESH,
        "why": "a test",
    }
    return HistoryEntry(**{**values, **changed})


def birth(record: Instance) -> Change:
    """A change that creates this record, whatever its state."""
    return Change(
        instance_id=record.instance_id,
        condition=WriteCondition(state=None, epoch=record.epoch),
        sets={item.name: getattr(record, item.name) for item in fields(Instance)},
        entry=entry("birth", source=None, target=record.state),
    )


def change(record: Instance, guard: WriteCondition | None = None, transition: str = "test", **sets: Any) -> Change:
    """A change of fields, by default guarded by state and epoch of the record."""
    return Change(
        instance_id=record.instance_id,
        condition=guard or WriteCondition(state=record.state, epoch=record.epoch),
        sets=sets,
        entry=entry(transition),
    )


def assignment(epoch: int = 1, number: int = 1) -> Assignment:
    return Assignment(
        url="https://github.com/octo/repo",
        runner_name=f"remuda-test-{epoch}-{instance_id(number)}",
        labels=("1234", "large"),
        credential=Credential(token="t0ken", expires_at=at(3_600)),
    )


def claim(record: Instance, owner: str) -> Change:
    return advance(
        record,
        Claim(
            run_id="1234",
            owner=owner,
            provision_id=owner.partition("/")[0],
            scope="octo/repo",
            tier=record.tier,
            threshold=at(300),
            assignment=assignment(record.epoch + 1),
            margin_s=1.0,
        ),
        by=Actor.PROVISION,
        now=NOW,
        why="picked from the pool",
    )


def provision(number: int = 1, **changed: Any) -> Provision:
    values: dict[str, Any] = {
        "provision_id": f"p-{number}",
        "run_id": "1234",
        "attempt": 1,
        "resource_class": "large",
        "count": 2,
        "created_at": at(number),
        "deadline": at(number + 300),
    }
    return Provision(**{**values, **changed})


def pool_config(revision: int = 1, **changed: Any) -> PoolConfig:
    token = Credential(token="t0ken", expires_at=at(3_600))
    values: dict[str, Any] = {
        "pool": "test",
        "classes": DEFAULT_CLASSES,
        "lifetimes": Lifetimes(keep_records_s=600.0),
        "max_instances": 100,
        "github_url": "https://github.com",
        "applied_at": NOW,
        "revision": revision,
        "tokens": (ScopeTokens(scope="octo/repo", registration=token, removal=token),),
        "launch": {"image": "ami-1"},
    }
    return PoolConfig(**{**values, **changed})


def message(number: int = 1, **changed: Any) -> PoolMessage:
    values: dict[str, Any] = {
        "id": instance_id(number),
        "epoch": 1,
        "resource_class": "large",
        "instance_type": "c6i.large",
        "usage_class": UsageClass.SPOT,
        "cpu": 2,
        "memory_mib": 4_096,
    }
    return PoolMessage(**{**values, **changed})
