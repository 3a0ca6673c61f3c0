"""Device-specific code: how vLLM is extended, and the kernels of attention and indexer.

Owns one package per platform (`cpu`, `ascend`), their common `parts` (of a worker's offload), `runner` (where
steps and draft passes begin) and `shared_caches` (tensors for a buffer plan), and `refusal` (ends a start-up
with one line). A platform builds pools and manager from `sparse` for its
worker; on Ascend it also plans and delivers on the device. The pools' rules and the plan's meaning are in
`sparse` and `ops`.
"""
