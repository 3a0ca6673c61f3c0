"""KV cache offload for sparse-attention (DSA) models, as an out-of-tree plugin of vLLM and vLLM-Ascend.

``plugin`` holds the entry points that vLLM loads. ``settings`` reads the options, ``geometry`` describes the
model's KV, and ``sparse.capacity`` computes how many blocks fit. The worker and runner of ``platforms``
connect these to vLLM. ``sparse`` owns the host pool and the hot pools, ``ops`` plans decode and copies its
rows, ``layerwise`` streams a prefill through shared buffers, and ``runtime`` owns the streams.
"""
