"""``MultiConnector`` for prefill engines that combine a store with remote decode.

vLLM's class calls its parts in order but does not coordinate them. Here, KV that the store has lost must
not be handed to decode, and a shared layer buffer may be reused only after the store has saved it *and*
every decode rank has read it. Any other combination behaves as in vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import multi_connector
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

from vllm_kvoffload.connectors.ascend_store.connector import AscendStoreConnector
from vllm_kvoffload.connectors.sfa_remote_d2h.connector import SfaRemoteD2HConnector
from vllm_kvoffload.log import get_logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = get_logger(__name__)


class KVOffloadMultiConnector(multi_connector.MultiConnector):
    """Places parts that track remote reads first, whatever the order in the configuration.

    So a layer is published before the store can load another layer into its memory, and a transfer is open
    before the store can report its request as lost.
    """

    joins_store_and_decode = True

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._connectors.sort(key=lambda part: not isinstance(part, SfaRemoteD2HConnector))
        self._stores = [part for part in self._connectors if isinstance(part, AscendStoreConnector)]
        self._remotes = [
            part for part in self._connectors if isinstance(part, SfaRemoteD2HConnector) and part.produces
        ]

    @property
    def loads_before_writes(self) -> bool:
        """See `AscendStoreConnector`."""
        return bool(self._stores)

    def part(self, kind: type[KVConnectorBase_V1]) -> KVConnectorBase_V1:
        """Returns the part of a class. Raises StopIteration if there is none."""
        return next(part for part in self._connectors if isinstance(part, kind))

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        joined = bool(self._remotes) and bool(self._stores)
        for remote in self._remotes if joined else ():
            remote.publish_last_layer_at_end()
            if any(store.shares_buffers for store in self._stores):
                remote.ask_for_progress()
        super().register_kv_caches(kv_caches)
        for store in self._stores if joined else ():
            (remote,) = self._remotes
            readers, worker = remote.readers, store.worker
            assert worker is not None
            store.use_read_guard(readers, remote.lease_s)
            if store.shares_buffers:
                readers.listen(worker.pipeline.gates.notify)
                logger.info("Layer buffers are used again when the store has them and decode has read them")

    def on_kv_cache_written(self, layer_name: str) -> None:
        """See `SfaRemoteD2HConnector`."""
        for remote in self._remotes:
            remote.on_kv_cache_written(layer_name)

    def wait_for_save(self) -> None:
        # The store first: it moves layers that did not run, and they are published afterwards.
        for part in reversed(self._connectors):
            part.wait_for_save()  # type: ignore[no-untyped-call]

    def reset_cache(self) -> bool:
        """Resets every part, also after one has failed. True only if all of them report success."""
        results = [_reset(part) for part in self._connectors]
        return all(results)


def _reset(part: KVConnectorBase_V1) -> bool:
    try:
        done = part.reset_cache()
    except Exception:
        logger.exception("%s can't be reset", type(part).__name__)
        return False
    if done is None:
        logger.warning("%s has no reset: the KV that it keeps stays valid", type(part).__name__)
    return bool(done)


MultiConnector = KVOffloadMultiConnector
"""The name that vLLM looks up in this module when a configuration gives `kv_connector_module_path`."""
