"""Active probes: GET /health of every engine, each by a task of its own."""

from __future__ import annotations

import asyncio
import random

from vllm_kvoffload.proxy.balance import Instance
from vllm_kvoffload.proxy.core import Core, logger
from vllm_kvoffload.proxy.errors import UpstreamError
from vllm_kvoffload.proxy.settings import PROBE_JITTER, Address

LATE = 1.25  # multiple of a probe's deadline
LOOK_SECONDS = 0.5  # interval of checks for added or removed engines


class Prober:
    """Probes each engine every ``probe_interval`` seconds; 0 disables probing.

    Two failed probes in a row mark an engine as down. Without any answer it is frozen or unreachable and
    no running call will end, so those are cut off and their requests go elsewhere. An engine that refuses
    connections or reports itself unhealthy may still finish its work: it only gets no new requests.
    """

    def __init__(self, core: Core) -> None:
        self._core = core

    def start(self) -> None:
        """Starts probing, until the core is closed."""
        if self._core.settings.probe_interval > 0:
            self._core.spawn(self._run())

    async def _run(self) -> None:
        watches: dict[Instance, asyncio.Task[None]] = {}
        try:
            while True:
                instances = {i for pool in self._core.pools for i in pool.instances.values()}
                for gone in watches.keys() - instances:
                    watches.pop(gone).cancel()
                for instance in instances:
                    if instance not in watches or watches[instance].done():
                        watches[instance] = asyncio.create_task(self._watch(instance))
                await asyncio.sleep(min(LOOK_SECONDS, self._core.settings.probe_interval))
        finally:
            for watch in watches.values():
                watch.cancel()
            await asyncio.gather(*watches.values(), return_exceptions=True)

    async def _watch(self, instance: Instance) -> None:
        settings = self._core.settings
        while True:
            try:
                well = await self.probe(instance)
            except Exception:  # any error: the next probe follows
                well = False
                self._core.metrics.loop_errors.inc()
                logger.exception("proxy: probing %s engine %s", instance.role, instance.address)
            again = not well and not instance.health.down
            pause = settings.probe_interval * random.uniform(2 - PROBE_JITTER, PROBE_JITTER)
            await asyncio.sleep(settings.probe_again if again else pause)

    async def probe(self, instance: Instance) -> bool:
        """Runs one probe; returns whether it succeeded. Changes of an engine's state are logged."""
        core, address, seconds = self._core, instance.address, self._core.settings.deadlines.probe
        clock = asyncio.get_running_loop().time
        began = clock()
        silent, reason, status = False, "", 0
        try:
            status = await self._status(address, seconds)
            reason = f"GET /health says {status}"
        except asyncio.TimeoutError:
            silent, reason = True, f"no answer to GET /health within {seconds:g} s"
        except UpstreamError as error:
            silent = error.deadline or isinstance(error.__cause__, asyncio.TimeoutError)
            reason = str(error)
        except Exception as error:  # a probe that cannot be sent has failed
            core.metrics.loop_errors.inc()
            reason = repr(error)
        late = clock() - began > LATE * seconds  # this process was stalled
        if silent and (late or core.client.heard_since(address, began)):
            return False  # or the engine is busy and only its /health is slow: repeat soon, do not count
        was_down = instance.health.down
        instance.health.probed(ok=status == 200)
        if instance.health.down and not was_down:
            instance.restarted()
            for pool in core.pools:
                for other in pool.instances.values():
                    other.unfit.pop(address, None)
                    other.proven.discard(address)
            core.client.forget(address)
            logger.warning("proxy: %s engine %s is down: %s", instance.role, address, reason)
        elif was_down and not instance.health.down:
            instance.restarted()
            logger.info("proxy: %s engine %s is back", instance.role, address)
        if instance.health.down and silent:
            self._cut_off(instance, reason)
        return status == 200

    async def _status(self, address: Address, seconds: float) -> int:
        """Returns the status of GET /health. Raises ``UpstreamError``, ``asyncio.TimeoutError``."""
        work = asyncio.create_task(self._core.control(address, "GET", "/health", seconds=seconds))
        try:
            # Not wait_for, which can swallow a cancellation as the answer arrives: a watch must end by it.
            await asyncio.wait({work}, timeout=seconds)
            if not work.done():
                raise asyncio.TimeoutError
            return work.result()[0]
        finally:
            work.cancel()

    def _cut_off(self, instance: Instance, reason: str) -> None:
        """Ends running calls, repeatedly while the engine is down: one may have started just before."""
        address = instance.address
        ended = self._core.client.fail(address, f"{instance.role} engine {address} is down: {reason}")
        if ended:
            self._core.metrics.cut_off.inc(ended)
            logger.warning("proxy: %d calls to %s were cut off", ended, address)
