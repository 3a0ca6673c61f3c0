"""The connector class that vLLM instantiates: once in the scheduler, once in each worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.utils.network_utils import get_ip

from vllm_kvoffload.connectors.device import current_npu
from vllm_kvoffload.connectors.sfa_remote_d2h.facts import digest_of
from vllm_kvoffload.connectors.sfa_remote_d2h.halves import ConnectorScheduler, ConnectorWorker, StepResults
from vllm_kvoffload.connectors.sfa_remote_d2h.layout import Layout, layer_index
from vllm_kvoffload.connectors.sfa_remote_d2h.metadata import LayoutMetadata, ReceiveReport
from vllm_kvoffload.connectors.sfa_remote_d2h.scheduler import DecodeScheduler, PrefillScheduler
from vllm_kvoffload.connectors.sfa_remote_d2h.worker_d import DecodeWorker
from vllm_kvoffload.connectors.sfa_remote_d2h.worker_p import PrefillWorker
from vllm_kvoffload.engine import EngineOptions
from vllm_kvoffload.log import get_logger
from vllm_kvoffload.metrics import DECODE, PREFILL, StatsChannel
from vllm_kvoffload.runtime.base import Event, Stream
from vllm_kvoffload.runtime.npu import compute_stream
from vllm_kvoffload.settings.remote_d2h import PROTOCOL, control_port
from vllm_kvoffload.transfer import make_engine

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = get_logger(__name__)


class SfaRemoteD2HConnector(KVConnectorBase_V1, SupportsHMA):
    """Decode pulls KV from prefill: main KV into its host pool, indexer KV into its device caches."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        options = EngineOptions.of(vllm_config).remote
        assert options is not None
        self._config = options
        if kv_cache_config is None or len(kv_cache_config.kv_cache_groups) != 1:
            raise ValueError("SfaRemoteD2HConnector needs a model whose KV caches share one block table")
        self._num_blocks = kv_cache_config.num_blocks
        self._block_size = vllm_config.cache_config.block_size
        self._results = StepResults()
        self._digest = ""
        self._idle = False  # the current step computes nothing
        self._joint: dict[str, Any] = {}  # arguments of PrefillWorker beside a store
        self._compute: Stream | None = None  # where writes are queued, not done when the call returns
        self.connector_worker: ConnectorWorker | None = None  # once the caches are registered
        self.connector_scheduler: ConnectorScheduler | None = None
        if role is KVConnectorRole.SCHEDULER:
            self.connector_scheduler = self._make_scheduler(vllm_config)

    def _make_scheduler(self, vllm_config: VllmConfig) -> ConnectorScheduler:
        parallel = vllm_config.parallel_config
        tp_size = parallel.tensor_parallel_size
        if self._config.producer:
            return PrefillScheduler(self._block_size, tp_size, self._config.decode_hosts)
        address = {
            "remote_engine_id": self._kv_transfer_config.engine_id,
            "remote_host": get_ip(),
            "remote_port": control_port(self._config.kv_port, parallel.data_parallel_index, tp_size, 0),
            "remote_tp_size": tp_size,
            "remote_pcp_size": 1,
            "remote_dcp_size": 1,
        }
        return DecodeScheduler(self._config, self._block_size, address)

    # ---------------------------------------------------------------------------------------- worker side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        layout = Layout.of(kv_caches, self._num_blocks)
        model = self._vllm_config.model_config
        facts = layout.facts(model.hf_text_config, model.dtype, self._block_size)
        if self._config.transfer_backend == "memfabric":
            facts[PROTOCOL] = self._config.protocol
        self._digest = digest_of(facts)
        device_id = get_tensor_model_parallel_rank()
        npu = current_npu()
        if npu is not None:
            device_id = npu.current_device()
            self._compute = compute_stream(npu, device_id)
        self.connector_worker = self._make_worker(layout, facts, device_id)
        self.connector_worker.start()

    def _make_worker(self, layout: Layout, facts: dict[str, str], device_id: int) -> ConnectorWorker:
        vllm_config, config = self._vllm_config, self._config
        engine = make_engine(
            config.transfer_backend,
            role="prefill" if config.producer else "decode",
            host=get_ip(),
            device_id=device_id,
            protocol=config.protocol,
        )
        dp_rank = vllm_config.parallel_config.data_parallel_index
        tp_size, tp_rank = get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()
        common: dict[str, Any] = {
            "tp_size": tp_size,
            "tp_rank": tp_rank,
            "limits": config.limits,
            "control_key": config.control_key,
            "channel": StatsChannel(
                PREFILL if config.producer else DECODE, vllm_config.instance_id, dp_rank, tp_rank
            ),
        }
        if config.producer:
            engine_id = str(self._kv_transfer_config.engine_id)
            logger.info("Prefill rank %d: %d layers can be pulled", tp_rank, len(layout.layers))
            return PrefillWorker(engine, layout, facts, engine_id=engine_id, **self._joint, **common)
        port = control_port(config.kv_port, dp_rank, tp_size, tp_rank)
        logger.info("Decode rank %d: control port %d, %d layers", tp_rank, port, len(layout.layers))
        return DecodeWorker(engine, layout, facts, host=get_ip(), port=port, **common)

    @property
    def produces(self) -> bool:
        """Whether decode engines read this engine's KV."""
        return self._config.producer

    @property
    def lease_s(self) -> float:
        """How long a decode rank may be silent before its transfers end, in seconds."""
        return self._config.limits.lease_s

    def ask_for_progress(self) -> None:
        """Asks decode to report its read progress, because layers share memory. Call before registering
        caches."""
        self._joint["progress"] = True

    def publish_last_layer_at_end(self) -> None:
        """Defers the last layer's publication to the end of the step, which may still be found invalid.
        Call before registering caches."""
        self._joint["last_layer_at_end"] = True

    @property
    def readers(self) -> PrefillWorker:
        """The worker that tracks unread layers: of a prefill engine whose caches are registered."""
        assert isinstance(self.connector_worker, PrefillWorker)
        return self.connector_worker

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        if self.connector_worker is not None:
            self.connector_worker.drop(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        # Not in start_load_kv: it is called only after the forward pass, and prefill may be faster than that.
        if self.connector_worker is not None:
            self.connector_worker.begin_step(connector_metadata)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Does nothing: loads were started when the step's metadata arrived."""
        self._idle = forward_context.attn_metadata is None

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: a request runs only after all its KV has arrived."""

    def on_kv_cache_written(self, layer_name: str) -> None:
        """Publishes a layer whose rows are written, before its attention runs. Only vllm-ascend calls this
        hook."""
        if self.connector_worker is not None:
            self.connector_worker.layer_done(layer_index(layer_name), self._written(layer_name))

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        self.on_kv_cache_written(layer_name)

    def _written(self, label: str) -> Event | None:
        """Returns an event behind all writes queued so far, None where writes are already complete."""
        return None if self._compute is None else self._compute.record(label)

    def wait_for_save(self) -> None:
        if self.connector_worker is not None:
            self.connector_worker.end_step(self._written("step"))

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if self.connector_worker is None:
            return None, None
        self._results = self.connector_worker.finish_step(finished_req_ids, self._idle)
        return self._results.sent, self._results.received

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._results.failed_blocks = self._results.failed_blocks, set()
        return failed

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Returns decode's layout for its scheduler half. Prefill's layout travels in its `Hello`."""
        return None if self._config.producer or not self._digest else LayoutMetadata(self._digest)

    def build_connector_worker_meta(self) -> ReceiveReport | None:
        """Returns the receive failures of this step, None if there are none."""
        failures, self._results.failures = self._results.failures, {}
        return ReceiveReport(failures) if failures else None

    def shutdown(self) -> None:
        if self.connector_worker is not None:
            self.connector_worker.stop()
        if self.connector_scheduler is not None:
            self.connector_scheduler.close()

    # ------------------------------------------------------------------------------------- scheduler side

    @property
    def _scheduler(self) -> ConnectorScheduler:
        assert self.connector_scheduler is not None, "vLLM's scheduler calls this, in its own process"
        return self.connector_scheduler

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._scheduler.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self._scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        made: KVConnectorMetadata = self._scheduler.metadata(scheduler_output)
        return made

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._scheduler.reported(connector_output)

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """Stores the layout digest of the workers, which is equal on all ranks."""
        for found in metadata.values():
            if isinstance(found, LayoutMetadata):
                self._scheduler.use_layout(found.digest)

    def reset_cache(self) -> bool:
        """Returns False while decode could still read KV computed before: the only KV kept here.

        That takes at most one lease after decode's last message.
        """
        return self._scheduler.reset()

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.finished(request.request_id), None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0])

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return bool(extra_config.get("use_layerwise", True))
