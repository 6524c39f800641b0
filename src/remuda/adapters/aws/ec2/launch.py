"""A launch to its end: answers that are partial or lost, and spot that falls back to on-demand."""

from __future__ import annotations

from remuda.adapters.aws.ec2.calls import TRIES, Ec2Calls
from remuda.adapters.aws.ec2.create_fleet import (
    Fleet,
    Refusal,
    client_token,
    failure,
    fleet_request,
    is_shortage,
    machine_tags,
    parse_fleet,
    sentences,
)
from remuda.adapters.aws.ec2.describe import by_tag, views_of
from remuda.adapters.aws.ec2.options import Options
from remuda.adapters.aws.tags import LAUNCH_TAG
from remuda.domain.errors import RemudaError, Throttled, Unavailable
from remuda.domain.resources import UsageClass
from remuda.ports.compute import POOL_TAG, Launched, LaunchRequest, LaunchResult

#: How often to look for the rest of what a lost answer launched: a describe may lag.
LOOKS = 3
#: What the second fleet of one launch adds to its token.
FALLBACK = "-od"


class Launcher:
    def __init__(self, *, calls: Ec2Calls, pool: str, template: str) -> None:
        self._calls = calls
        self._pool = pool
        self._template = template

    async def launch(self, request: LaunchRequest, options: Options, *, look_first: bool) -> LaunchResult:
        """`look_first`: this token was asked for before, and may have launched."""
        usage = request.request.usage_class
        fleet = await self._fleet(
            request, options, usage=usage, count=request.count, token=request.client_token, look_first=look_first
        )
        missing = request.count - len(fleet.instances)
        if missing and usage is UsageClass.SPOT and options.falls_back and is_shortage(fleet.refusals):
            fleet = await self._add_on_demand(request, options, fleet, missing, look_first=look_first)
        if not fleet.instances:
            raise failure(request.request, request.count, fleet.refusals)
        return LaunchResult(instances=fleet.instances, errors=sentences(fleet.refusals))

    async def _add_on_demand(
        self, request: LaunchRequest, options: Options, spot: Fleet, missing: int, *, look_first: bool
    ) -> Fleet:
        token = request.client_token + FALLBACK
        try:
            more = await self._fleet(
                request, options, usage=UsageClass.ON_DEMAND, count=missing, token=token, look_first=look_first
            )
        except RemudaError as error:
            if not spot.instances:
                raise
            # What spot gave is known: the caller must hear of it.
            more = Fleet(refusals=(Refusal(code=type(error).__name__, sentence=error.message),))
        instances = sorted((*spot.instances, *more.instances), key=lambda item: item.instance_id)
        return Fleet(instances=tuple(instances), refusals=(*spot.refusals, *more.refusals))

    async def _fleet(
        self, request: LaunchRequest, options: Options, *, usage: UsageClass, count: int, token: str, look_first: bool
    ) -> Fleet:
        """Where an answer was lost, look for the machines before the call is repeated: EC2 knows the token, but not
        every server that speaks its language does.
        """
        name = client_token(token)
        asked = fleet_request(
            template=self._template,
            request=request.request,
            subnets=options.subnets,
            count=count,
            usage=usage,
            token=name,
            tags={**machine_tags(request, options, self._pool), LAUNCH_TAG: name},
        )
        for attempt in range(1, TRIES + 1):
            if look_first or attempt > 1:
                found = await self._find(name, count, usage)
                if found is not None:
                    return found
            try:
                return parse_fleet(await self._calls.ask("CreateFleet", repeat=False, **asked), usage)
            except Throttled:
                raise
            except Unavailable:
                if attempt == TRIES:
                    raise
            await self._calls.pause(attempt)
        raise AssertionError  # pragma: no cover - the loop returns or raises

    async def _find(self, launch: str, count: int, usage: UsageClass) -> Fleet | None:
        """What an earlier call launched, or None where nothing of it is to be seen."""
        instances: list[Launched] = []
        for look in range(1, LOOKS + 1):
            views = await views_of(self._calls, by_tag(LAUNCH_TAG, launch) + by_tag(POOL_TAG, self._pool))
            instances = [
                Launched(instance_id=view.instance_id, instance_type=view.instance_type, usage_class=usage)
                for view in views
            ]
            if not instances:
                return None
            if len(instances) >= count:
                break
            if look < LOOKS:
                await self._calls.pause(look)
        refusals: tuple[Refusal, ...] = ()
        if len(instances) < count:
            story = f"{len(instances)} of {count} instances were found of a launch whose answer was lost"
            refusals = (Refusal(code="AnswerLost", sentence=story),)
        return Fleet(
            instances=tuple(sorted(instances, key=lambda item: item.instance_id)),
            refusals=refusals,
        )
