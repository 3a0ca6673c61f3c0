"""vLLM's scheduler, which also knows of lost KV in what a step itself computed.

A worker reports device blocks whose KV is lost. vLLM looks for them among the tokens that a request had
before the step, which is where KV is loaded to; a request's first step has none. Yet while a copy that was
given up may still write to the device, nothing that a step computes is to be trusted, and the token that
comes of it least of all.
"""

from __future__ import annotations

from vllm.v1.core.sched.scheduler import Scheduler


class LostStepScheduler(Scheduler):
    """A step that read or wrote a lost block is computed again, or ends its request, as the policy says."""

    def _handle_invalid_blocks(
        self, invalid_block_ids: set[int], num_scheduled_tokens: dict[str, int]
    ) -> set[str]:
        """Requests whose output is to be dropped; with the policy `fail` vLLM then ends them."""
        lost: set[str] = super()._handle_invalid_blocks(invalid_block_ids, num_scheduled_tokens)
        spoilt = set(invalid_block_ids)  # also of requests that were aborted while the step ran
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
                # By itself, also what it shares: the one that vLLM leaves it to may be slower, or gone.
                request.num_computed_tokens = min(begin, first * size)
        # Nobody may be given them before they are computed, and who was to do that may never.
        self.kv_cache_manager.evict_blocks(spoilt)
        return lost
