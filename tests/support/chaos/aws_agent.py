"""The agent of a machine on the AWS test servers: the real agent and store, on a local machine instead of EC2."""

from __future__ import annotations

import asyncio
import os
import sys

from remuda.adapters.aws.clients import AwsClients, config
from remuda.adapters.aws.dynamodb.keys import own_key_prefix
from remuda.adapters.aws.dynamodb.store import DynamoInstanceStore
from remuda.adapters.local.machine import machine_folder
from remuda.adapters.system.clock import SystemClock, SystemIds
from remuda.cli.agent import LineEventLog, run_on_local_machine
from remuda.domain.errors import RemudaError
from remuda.ports.calls import CallCounter

POOL_VARIABLE = "REMUDA_POOL"


async def run(event_log: LineEventLog) -> None:
    async with AwsClients() as clients:
        sts = await clients.service("sts", "STS", config())
        store = DynamoInstanceStore(
            client=await clients.dynamodb(),
            table=f"remuda-{os.environ[POOL_VARIABLE]}",
            clock=SystemClock(),
            ids=SystemIds(),
            calls=CallCounter(),
            key_prefix=await own_key_prefix(sts, machine_folder(os.environ).name),
        )
        try:
            await run_on_local_machine(store, event_log)
        finally:
            await store.close()


def main() -> int:
    event_log = LineEventLog(SystemClock())
    try:
        asyncio.run(run(event_log))
    except RemudaError as error:
        event_log.fail(error)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
