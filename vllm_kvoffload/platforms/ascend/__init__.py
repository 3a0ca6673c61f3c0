"""The Ascend platform: the offload on vllm-ascend, by subclassing its platform, worker, runner and
attention.

Owns `symbols` (every private upstream name used, checked at start-up), `hooks` (the two places where
upstream must be pointed to our classes), `platform` and `checks` (configuration and its validation),
`worker`, `runner`, `attention`, `caches` (upstream's cache specs and tuples), `rows` and `host_memory`
(storing and moving rows), `kernels`, `graphs` and `delivery` (decode by the AscendC kernels), `offload`
(assembles decode), `connectors` (resolves connector names) and, for prefill with shared layer memory,
`prefill_attention` and `staged_copies`. None of it has run on an NPU yet: docs/ascend.md
says what was verified, and how.
"""
