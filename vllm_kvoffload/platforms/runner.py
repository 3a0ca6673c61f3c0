"""What the model runners of all platforms do for the offload."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from vllm.forward_context import get_forward_context

from vllm_kvoffload.platforms.parts import WorkerOffload, add_load_errors

if TYPE_CHECKING:

    class _Runner:
        """The methods of vLLM's runner that are overridden."""

        compilation_config: Any
        input_batch: Any

        def _update_states(self, scheduler_output: Any) -> Any: ...
        def _model_forward(self, *args: Any, **kwargs: Any) -> Any: ...
        def _dummy_run(self, *args: Any, **kwargs: Any) -> Any: ...
        def execute_model(self, *args: Any, **kwargs: Any) -> Any: ...
        def sample_tokens(self, *args: Any, **kwargs: Any) -> Any: ...
        def shutdown(self) -> None: ...

else:
    _Runner = object


class DraftModel:
    """Stands for a drafter's model: opens a draft pass around each call, and is the model otherwise.

    A forward pre-hook would not do: a model under ``support_torch_compile`` calls its forward, or compiled
    code, without them.
    """

    def __init__(self, model: Any, open_pass: Callable[[], AbstractContextManager[None]]) -> None:
        self._model = model
        self._open_pass = open_pass

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._open_pass():
            return self._model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def unwrap(self) -> Any:
        """Returns the drafter's own model."""
        return self._model


class OffloadRunnerMixin(_Runner):
    """Tells the offload of requests, steps and draft passes. Comes before vLLM's runner among the bases.

    A step begins in :meth:`_model_forward`, which vLLM calls once in every step with requests, whether in
    graphs or not; a draft pass begins where the drafter calls its model (:class:`DraftModel`). Steps in
    which only a connector works call neither; profiling has no attention metadata.
    """

    offload: WorkerOffload[Any] | None = None

    def watch_drafter(self) -> None:
        """Makes every draft pass begin with the offload. Called when drafter and offload are there."""
        drafter: Any = getattr(self, "drafter", None)
        assert self.offload is not None
        if drafter is not None and self.offload.manager.geometry.num_mtp_layers:
            drafter.model = DraftModel(drafter.model, self._open_draft_pass)

    def _open_draft_pass(self) -> AbstractContextManager[None]:
        offload, context = self.offload, get_forward_context()
        if offload is None or offload.dummy or not context.attn_metadata:
            return nullcontext()
        return offload.draft_pass(context, self.input_batch.req_ids)

    def _open_target_pass(self) -> AbstractContextManager[None]:
        offload, context = self.offload, get_forward_context()
        if offload is None or not context.attn_metadata:
            return nullcontext()
        assert isinstance(context.attn_metadata, dict)  # a list only with micro-batches
        if offload.dummy:
            return offload.dummy_pass(context)
        return offload.target_pass(context, self.input_batch.req_ids)

    def _model_forward(self, *args: Any, **kwargs: Any) -> Any:
        """Begins the step, and runs the target model in it."""
        with self._open_target_pass():
            return super()._model_forward(*args, **kwargs)

    def _dummy_run(self, *args: Any, **kwargs: Any) -> Any:
        with nullcontext() if self.offload is None else self.offload.dummy_run():
            return super()._dummy_run(*args, **kwargs)

    def _update_states(self, scheduler_output: Any) -> Any:
        if self.offload is not None:
            manager = self.offload.manager
            manager.release(scheduler_output.finished_req_ids)
            manager.release(scheduler_output.preempted_req_ids or ())
            # Blocks that are now filled from outside: no rank may still write for a former owner. Of those
            # that upstream copies, it reads the source as well. vLLM 0.23 copies none.
            copies = getattr(scheduler_output, "kv_cache_block_copies", None)
            if copies or getattr(scheduler_output.kv_connector_metadata, "receives", None):
                self.offload.settle()
        return super()._update_states(scheduler_output)

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        output = super().execute_model(*args, **kwargs)
        if self.offload is not None:
            self.offload.publish()
        return output

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        output = super().sample_tokens(*args, **kwargs)  # drafts, too
        add_load_errors(output)
        if self.offload is not None:
            self.offload.publish()
        return output

    def shutdown(self) -> None:
        """Calls upstream's, then unbinds the layers and frees the pools, whatever upstream raised."""
        offload, self.offload = self.offload, None
        layers = list(self.compilation_config.static_forward_context.values())  # upstream empties it
        drafter: Any = getattr(self, "drafter", None)
        if isinstance(getattr(drafter, "model", None), DraftModel):
            drafter.model = drafter.model.unwrap()
        try:
            super().shutdown()
        finally:
            self._unbind(layers)
            if offload is not None:
                offload.close()

    def _unbind(self, layers: list[Any]) -> None:
        """Takes away what the platform bound to these layers."""
        raise NotImplementedError
