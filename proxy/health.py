"""Active probes: GET /health of every engine, beside the requests."""

from __future__ import annotations

import asyncio
import random

from vllm_kvoffload.proxy.balance import Instance
from vllm_kvoffload.proxy.core import Core, logger
from vllm_kvoffload.proxy.errors import UpstreamError


class Prober:
    """Probes all engines every ``probe_interval`` seconds; 0 is never."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def start(self) -> None:
        """Probes from now on, until the core is closed."""
        if self._core.settings.probe_interval > 0:
            self._core.spawn(self._run())

    async def _run(self) -> None:
        while True:
            instances = [i for pool in self._core.pools for i in pool.instances.values()]
            await asyncio.gather(*(self.probe(i) for i in instances))
            await asyncio.sleep(self._core.settings.probe_interval * random.uniform(0.8, 1.2))

    async def probe(self, instance: Instance) -> None:
        """One probe; an engine that comes or goes is logged."""
        try:
            status, _, _ = await self._core.control(instance.address, "GET", "/health")
        except UpstreamError:
            status = 0
        was_down = instance.health.down
        instance.health.probed(ok=status == 200)
        if instance.health.down and not was_down:
            instance.forget_prefixes()
            self._core.client.forget(instance.address)
            logger.warning("proxy: %s engine %s is down", instance.role, instance.address)
        elif was_down and not instance.health.down:
            logger.info("proxy: %s engine %s is back", instance.role, instance.address)
