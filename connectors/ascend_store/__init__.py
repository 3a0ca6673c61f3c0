"""``AscendStoreConnector``: a prefill engine whose KV lives in a store and passes through a few buffers.

Owns: the scheduler half (which prefix of a prompt the store holds, which rows a step moves) and the worker
half (which store object holds each block, what is published, what counts as lost).
Does not own: how bytes move and when a buffer is free (``layerwise``), where objects are (``store``), how
decode gets KV (``sfa_remote_d2h``).
"""
