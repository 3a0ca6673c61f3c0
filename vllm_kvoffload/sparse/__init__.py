"""Sparse decode offload: the whole main KV in host memory, only chosen rows in device memory.

Owns `host_pool` (shared memory of a DP rank) and `host_store` (writes into it), `hot_pool` (device rows and
their residencies), `rows` (which request has which row), `capacity` (what fits: the only place that decides),
`manager` (a step's batch, rows and writes), `delivery` and `compact` (decode: an index group from plan to
attention), `prefill_stream` (prefixes from the host pool through a few buffers), `offloaded` (main KV of one
layer as attention reads it) and `paged` (the same without offload).
Never touches vLLM, model code or streams as such: platforms call it, `ops` computes, `runtime` runs.
"""
