"""vLLM's scheduler, which also knows of lost KV in what a step itself computed.

A worker reports device blocks whose KV is lost. vLLM looks for them among the tokens that a request had
before the step, which is where KV is loaded to; a request's first step has none. Yet while a copy that was
given up may still write to the device, nothing that a step computes is to be trusted, and the token that
comes of it least of all.
"""

from __future__ import annotations

from vllm.v1.core.sched.scheduler import Scheduler


class LostStepScheduler(Scheduler):
    """A step that wrote to a lost block is computed again, or ends its request, as the policy says."""

    def _handle_invalid_blocks(
        self, invalid_block_ids: set[int], num_scheduled_tokens: dict[str, int]
    ) -> set[str]:
        """Requests whose output is to be dropped; with the policy `fail` vLLM then ends them."""
        lost: set[str] = super()._handle_invalid_blocks(invalid_block_ids, num_scheduled_tokens)
        for request in self.running:
            name = request.request_id
            scheduled = num_scheduled_tokens.get(name, 0)
            if not scheduled or name in lost:
                continue
            begin = request.num_computed_tokens - scheduled
            (blocks,) = self.kv_cache_manager.get_block_ids(name)
            written = set(
                blocks[begin // self.block_size : -(-request.num_computed_tokens // self.block_size)]
            )
            if invalid_block_ids.isdisjoint(written):
                continue
            lost.add(name)
            if self.recompute_kv_load_failures:
                request.num_computed_tokens = begin
            else:
                self.kv_cache_manager.evict_blocks(written)
        return lost
