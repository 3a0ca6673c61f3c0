"""The Ascend platform: the offload on vllm-ascend, by subclasses of its platform, worker, runner, attention.

Owns `symbols` (every private upstream name that is used, checked at start-up), `hooks` (the two places where
upstream has to be told of our classes), `platform` and `checks` (configuration and its refusals), `worker`,
`runner`, `attention`, `caches` (upstream's cache specs and tuples), `rows` and `host_memory` (how rows are
kept and moved), `kernels` and `delivery` (decode by the AscendC kernels), `offload` (puts decode together),
`connectors` (whose class a connector's name means), and, for prefill whose layers share memory,
`shared_caches`, `prefill_attention` and `staged_copies`.
Nothing here was ever run on an NPU: docs/ascend.md says what was verified, and how.
"""
