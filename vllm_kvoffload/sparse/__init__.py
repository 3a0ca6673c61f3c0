"""Sparse decode offload: the whole main KV in host memory, only rows of top-k indices in device memory.

Owns `host_pool` (shared memory of a DP rank) and `host_rows` (writes into it), `hot_pool` (device rows and
residencies), `partitions` (each request's part of the hot pools), `capacity` (number of KV blocks), `manager`
(a step's batch, partitions and writes), `delivery` and `compact` (decode: an index group from plan to
attention), `prefill_stream` (prefixes from the host pool through a few buffers), `offloaded` (main KV of one
layer as attention reads it) and `paged` (the same without offload). Imports neither vLLM nor model code:
platforms call it, `ops` computes, and `runtime` provides the streams.
"""
