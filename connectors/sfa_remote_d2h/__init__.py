"""``SfaRemoteD2HConnector``: decode pulls a request's KV from prefill while prefill computes.

Owns: the rendezvous, the wire protocol with its sessions, leases and deadlines, the mapping of blocks to
reads, secrets, keys and allowed hosts. Pure modules: `wire`, `facts`, `hosts`, `ports`, `counts`,
`producer`, `consumer`, `introductions`, `pending`. `worker_p` and `worker_d` run them on sockets and a
transfer engine, `scheduler` and `connector` are the parts that vLLM calls. See docs/pd.md.
Does not own: pools and rows (``sparse``), streams (``runtime``), how bytes move (``transfer``).
"""
