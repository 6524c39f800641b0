"""The record of a batch of acquisitions for a set: one provision for all machines claimed or launched together.

It is the intent of the launch, written before EC2 is asked, and the outcome for reports. It holds nothing: a set holds
each machine by the machine's own record. So nothing depends on its end, and a sweep ends it if its listener did not.
"""

from __future__ import annotations

import asyncio

from remuda.controlplane.context import Context, record_intent
from remuda.controlplane.provision.outcome import OutcomeRecorder
from remuda.domain.errors import Interrupted, RemudaError
from remuda.domain.instance import Instance
from remuda.domain.pool_config import PoolConfig
from remuda.domain.provision import MAX_ERROR, Provision, ProvisionEnding, RunnerSource, released, settled
from remuda.domain.timestamps import after


class AcquisitionRecord:
    """Example: two jobs wait, and the pool has one machine. The batch claims it and launches another. The record is
    written before the launch, and closed when the second machine listens: one reused, one created.
    """

    def __init__(self, context: Context, config: PoolConfig, provision: Provision) -> None:
        self.provision = provision
        self.recorder = OutcomeRecorder(context.clock)
        self._context = context
        self._keep_s = config.lifetimes.keep_records_s
        self._writing: asyncio.Future[None] | None = None
        self._is_stored = False
        #: Machines that are still to be acquired or given up.
        self._open = provision.count
        self._acquired = 0
        self._failure: RemudaError | None = None

    async def store(self) -> None:
        """Write it, before the launch of its machines. All that are launched share one write."""
        self._writing = self._writing or asyncio.ensure_future(self._write())
        await asyncio.shield(self._writing)

    async def _write(self) -> None:
        await record_intent(self._context, self.provision)
        self._is_stored = True

    async def acquired(self, instance: Instance) -> None:
        """The runner of one machine starts."""
        self._acquired += 1
        source = RunnerSource.CREATED if instance.epoch == 1 else RunnerSource.POOL
        self.recorder.acquire(instance.instance_id, source)
        await self._end_one()

    async def given_up(self, failure: RemudaError | None = None) -> None:
        """One machine fewer is wanted, or could not be acquired."""
        self._failure = self._failure or failure
        await self._end_one()

    async def _end_one(self) -> None:
        self._open -= 1
        if self._open != 0 or not (self._is_stored or self._acquired or self._failure):
            return
        context, provision, final = self._context, self.provision, self._final()
        try:
            if self._is_stored:
                await context.store.replace_provision(provision, final)
            else:
                await context.store.put_provision(final)
        except RemudaError as error:
            context.event_log.record("acquisition-unrecorded", error.message, run_id=provision.subject)

    def _final(self) -> Provision:
        now, failure = self._context.clock.now(), None if self._acquired else self._failure
        ending = ProvisionEnding.RELEASED
        if failure is not None:
            is_interrupted = isinstance(failure, Interrupted)
            ending = ProvisionEnding.INTERRUPTED if is_interrupted else ProvisionEnding.FAILED
        outcome = self.recorder.outcome(
            error=failure.describe(MAX_ERROR) if failure else "", exit_code=failure.exit_code if failure else 0
        )
        why = failure.message if failure else f"{self._acquired} of {self.provision.count} machines were started"
        ended = released(self.provision, now=now, why=why, ending=ending, outcome=outcome)
        return settled(ended, forget_at=after(now, self._keep_s))
