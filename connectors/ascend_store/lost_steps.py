"""A scheduler subclass that also handles KV lost among the tokens that a step itself computed.

A worker reports the device blocks whose KV is lost. vLLM searches for them only among the tokens that a
request had before the step, where KV is loaded; a request's first step has none. But as long as an
abandoned copy may still write to the device, nothing that a step computes can be trusted, and its sampled
token least.
"""

from __future__ import annotations

from vllm.v1.core.sched.scheduler import Scheduler


class LostStepScheduler(Scheduler):
    """Recomputes a step that read or wrote a lost block, or ends its request, depending on the policy."""

    def _handle_invalid_blocks(
        self, invalid_block_ids: set[int], num_scheduled_tokens: dict[str, int]
    ) -> set[str]:
        """Returns the requests whose output must be dropped; with the policy `fail`, vLLM then ends them."""
        lost: set[str] = super()._handle_invalid_blocks(invalid_block_ids, num_scheduled_tokens)
        spoilt = set(invalid_block_ids)  # may include blocks of requests aborted while the step ran
        for request in self.running:
            name, size = request.request_id, self.block_size
            (blocks,) = self.kv_cache_manager.get_block_ids(name)
            first = next((n for n, block in enumerate(blocks) if block in invalid_block_ids), None)
            if first is None:
                continue
            spoilt.update(blocks[first:])
            begin = request.num_computed_tokens
            if name not in lost:
                lost.add(name)
                begin -= num_scheduled_tokens.get(name, 0)
            if self.recompute_kv_load_failures:
                # The request recomputes shared blocks itself: the one that vLLM leaves them to may be slower,
                # or gone.
                request.num_computed_tokens = min(begin, first * size)
        # Evict them from the prefix cache until they are computed: the request that was to compute them may
        # not.
        self.kv_cache_manager.evict_blocks(spoilt)
        return lost
