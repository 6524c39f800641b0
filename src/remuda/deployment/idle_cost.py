"""What a pool costs while nothing runs: its functions, metrics, alarms, secret and listener.

`remuda deploy` shows it before it asks. Example: a pool with runner sets, in a public subnet:

    when nothing runs, the pool costs about 21.84 $ per month:
      listener (t3.micro) 7.59, its disk 0.64, its address (in a public subnet) 3.65, metrics 8.93, …
    each idle instance adds 7.04 $ per month to its own price:
      disk of 30 GiB 2.40, address (in a public subnet) 3.65, polls and heartbeats 0.99

A NAT gateway, which Remuda does not create, is shown if the subnets use one. Storage and other calls of table, queues,
bucket and logs are cents.
"""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from remuda.adapters.aws.ec2.options import DEFAULT_VOLUME_GIB
from remuda.controlplane.demand.heartbeat import INTERVAL_S
from remuda.deployment.listener import VOLUME_GIB
from remuda.domain.instance import LIVE
from remuda.domain.thresholds import HEARTBEAT_INTERVAL_S
from remuda.ports.poll_intervals import LONG_IDLE

#: Date of the prices below, from AWS's public price pages; those of instances as in the price list of EC2.
DATED = "2026-11"
PRICE_REGION = "us-east-1"
HOURS = 730.0
#: CloudWatch: a metric per month (the first 10,000), an alarm of standard resolution, and 1,000 calls of PutMetricData.
METRIC, ALARM, METRIC_CALLS = 0.30, 0.10, 0.01
#: Secrets Manager: a secret per month, and a call. Each run of a command reads the credential, and the listener every
#: two minutes.
SECRET, SECRET_CALL = 0.40, 0.05 / 10_000
LISTENER_READS_PER_HOUR = 30
#: DynamoDB on demand: a consistent read of up to 4 KB, and a write of up to 1 KB.
READ, WRITE = 0.125e-6, 0.625e-6
#: Lambda: a second with 1 GiB on x86_64.
FUNCTION_SECOND = 0.0000166667
#: Seconds of one refresh or scale-down that finds nothing to do, as in the benchmarks, and how often they run.
IDLE_RUN_S, RUNS_PER_HOUR = 1.5, 12
#: EC2: a public address per hour, a GiB of gp3 per month, a NAT gateway per hour, and the usual types of the listener.
ADDRESS, DISK_GIB, NAT = 0.005, 0.08, 0.045
LISTENER_TYPES = {
    "t3.nano": 0.0052,
    "t3.micro": 0.0104,
    "t3.small": 0.0208,
    "t3.medium": 0.0416,
    "t4g.nano": 0.0042,
    "t4g.micro": 0.0084,
    "t4g.small": 0.0168,
    "t4g.medium": 0.0336,
}

#: Metrics that a command writes although nothing happens: five of every invocation, and its own. The test of the
#: functions compares them with what they write.
METRICS = {"refresh": 5 + len(LIVE) + 4, "scale-down": 5 + 3, "listen": 5}


@dataclass(frozen=True, kw_only=True, slots=True)
class IdleCost:
    """Dollars per month by item. Items without a price are in `unpriced`."""

    items: Mapping[str, float]
    #: What an idle instance costs beside its own price.
    per_instance: Mapping[str, float]
    unpriced: tuple[str, ...] = ()
    #: Whether the subnets need a NAT gateway.
    has_nat: bool = False

    @property
    def total(self) -> float:
        return sum(self.items.values())

    def lines(self) -> list[str]:
        """For people, in 80 columns."""
        more = f", and {', '.join(self.unpriced)}" if self.unpriced else ""
        nat = [f"a NAT gateway of the subnets costs {NAT * HOURS:.2f} $ per month and 0.045 $ per GB"]
        return [
            f"when nothing runs, the pool costs about {self.total:.2f} $ per month:",
            *_wrapped(f"{_parts(self.items)}{more} (list prices of {PRICE_REGION}, {DATED})"),
            f"each idle instance adds {sum(self.per_instance.values()):.2f} $ per month to its own price:",
            *_wrapped(_parts(self.per_instance)),
            *(nat if self.has_nat else []),
        ]

    def document(self) -> dict[str, Any]:
        return {
            "currency": "USD",
            "prices": f"{PRICE_REGION}, {DATED}",
            "monthly": round(self.total, 2),
            "items": {name: round(dollars, 2) for name, dollars in self.items.items()},
            "per_instance": {name: round(dollars, 2) for name, dollars in self.per_instance.items()},
            "nat_gateway": round(NAT * HOURS, 2) if self.has_nat else 0.0,
            "unpriced": list(self.unpriced),
        }


def _parts(items: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {dollars:.2f}" for name, dollars in items.items())


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, width=80, initial_indent="  ", subsequent_indent="  ")


def _per_instance(parameters: Mapping[str, str], *, is_public: bool) -> dict[str, float]:
    gib = float(parameters.get("VolumeSizeGib") or DEFAULT_VOLUME_GIB)
    seconds = HOURS * 3_600
    calls = seconds / LONG_IDLE.last_s * READ + seconds / HEARTBEAT_INTERVAL_S * WRITE
    address = {"address (in a public subnet)": ADDRESS * HOURS} if is_public else {}
    return {f"disk of {gib:g} GiB": DISK_GIB * gib, **address, "polls and heartbeats": calls}


def idle_cost(
    resources: Collection[str],
    parameters: Mapping[str, str],
    *,
    owns_secret: bool,
    outbound: Collection[str] = ("public",),
) -> IdleCost:
    """The cost of a stack with these resources, by logical id, and these effective parameters.

    `outbound` are the routes of its subnets to the internet: `public`, `nat`, or `none`.
    """
    is_public = "public" in outbound
    has_listener, has_functions = "ListenerGroup" in resources, "RefreshFunction" in resources
    # It may also run elsewhere, as a container: then it writes its metrics all the same.
    writers = [
        *(("refresh",) if has_functions else ()),
        *(("scale-down",) if has_functions and parameters.get("ScaleDown") == "true" else ()),
        *(("listen",) if parameters.get("RunnerSets") else ()),
    ]
    unpriced: list[str] = []

    def items() -> Iterator[tuple[str, float]]:
        if has_listener:
            name = parameters.get("ListenerInstanceType", "")
            if name in LISTENER_TYPES:
                yield f"listener ({name})", LISTENER_TYPES[name] * HOURS
            else:
                unpriced.append(f"the listener ({name})")
            yield "its disk", DISK_GIB * VOLUME_GIB
            if is_public:
                yield "its address (in a public subnet)", ADDRESS * HOURS
        calls = HOURS * 3_600 / INTERVAL_S / 1_000 * METRIC_CALLS if "listen" in writers else 0.0
        if writers:
            yield "metrics", METRIC * sum(METRICS[name] for name in writers) + calls
        alarms = sum(name.endswith("Alarm") for name in resources)
        if alarms:
            yield "alarms", ALARM * alarms
        scheduled = sum(name in writers for name in ("refresh", "scale-down"))
        if scheduled:
            yield "functions", scheduled * RUNS_PER_HOUR * HOURS * IDLE_RUN_S * FUNCTION_SECOND
        reads = scheduled * RUNS_PER_HOUR + LISTENER_READS_PER_HOUR * ("listen" in writers)
        if owns_secret or reads:
            yield "secret", SECRET * owns_secret + reads * HOURS * SECRET_CALL

    return IdleCost(
        items=dict(items()),
        per_instance=_per_instance(parameters, is_public=is_public),
        unpriced=tuple(unpriced),
        has_nat="nat" in outbound or bool(parameters.get("FunctionSubnetIds")),
    )
