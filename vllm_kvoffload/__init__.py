"""KV cache offload for sparse-attention (DSA) models, as an out-of-tree plugin of vLLM and vLLM-Ascend.

A request's way through the package: ``config`` and ``geometry`` say what is served, ``sparse.capacity`` how
much of it fits, a platform's worker and runner put it together, ``layerwise`` streams prefill from the host
pool, ``ops`` plans and fetches what decode attends to, ``sparse`` owns every pool and row, ``runtime`` every
stream. ``plugin`` is what vLLM loads.
"""
