"""An EC2 server, a client and computes on it, for tests that look at what only EC2 does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from remuda.adapters.aws.ec2.compute import Ec2Compute
from remuda.adapters.system.clock import SystemClock, SystemIds
from remuda.domain.resources import ResourceClass, RunnerRequest, Tier, TypePatterns, UsageClass
from remuda.ports.calls import CallCounter
from remuda.ports.compute import LaunchRequest, LaunchResult
from tests.support.moto_server import MotoServer, shared_server

if TYPE_CHECKING:
    from types_aiobotocore_ec2 import EC2Client

LARGE = ResourceClass(name="large", cpu=2, memory_mib=4096)


class HastyClock(SystemClock):
    """Pauses between tries are noted, not waited for."""

    def __init__(self) -> None:
        self.slept: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await asyncio.sleep(0)


@dataclass(kw_only=True)
class Ec2World:
    server: MotoServer
    client: EC2Client
    #: Launch options that work.
    options: dict[str, str]
    calls: CallCounter
    clock: HastyClock

    @property
    def subnets(self) -> list[str]:
        return self.options["subnet-ids"].split(",")

    def compute(self, pool: str = "pool") -> Ec2Compute:
        return Ec2Compute(client=self.client, pool=pool, clock=self.clock, ids=SystemIds(), calls=self.calls)

    async def prepared(self, pool: str = "pool") -> Ec2Compute:
        compute = self.compute(pool)
        await compute.prepare(self.options)
        return compute

    def wanted(
        self,
        token: str = "token",
        *,
        count: int = 1,
        patterns: str = "*",
        spot: bool = False,
        scope: str = "acme/widgets",
        launch: dict[str, str] | None = None,
        **more: Any,
    ) -> LaunchRequest:
        return LaunchRequest(
            provision_id=f"provision-{token}",
            client_token=token,
            count=count,
            request=RunnerRequest(
                resource_class=LARGE,
                usage_class=UsageClass.SPOT if spot else UsageClass.ON_DEMAND,
                patterns=TypePatterns.parse(patterns),
                tier=Tier.TRUSTED,
            ),
            scope=scope,
            launch={**self.options, **(launch or {})},
            first_life_s=400.2,
            margin_s=60,
            **more,
        )

    async def instances(self) -> list[dict[str, Any]]:
        """All there are, as EC2 shows them."""
        found: list[dict[str, Any]] = []
        async for page in self.client.get_paginator("describe_instances").paginate():
            for reservation in page["Reservations"]:
                found += [dict(item) for item in reservation["Instances"]]
        return found

    async def stranger(self) -> str:
        """Somebody else's machine."""
        answer = await self.client.run_instances(
            ImageId=self.options["ami"], InstanceType="t3.micro", MinCount=1, MaxCount=1
        )
        return answer["Instances"][0]["InstanceId"]


@asynccontextmanager
async def ec2_world() -> AsyncIterator[Ec2World]:
    server = shared_server()
    server.reset()
    async with server.client() as client:
        options = await server.launch_options(client)
        yield Ec2World(server=server, client=client, options=options, calls=CallCounter(), clock=HastyClock())


def ids(result: LaunchResult) -> list[str]:
    return [launched.instance_id for launched in result.instances]
