"""``AscendStoreConnector``: a prefill engine whose KV lives in a store and passes through a few buffers.

Owns: the options, the scheduler's half (what the store has of a prompt, which rows a step moves), and the
worker's half (which object of the store each block is in, what is published, what counts as lost).
Never touches: how bytes move and when a buffer is free (``layerwise``), where objects are (``store``), how
decode gets KV (``sfa_remote_d2h``).
"""
