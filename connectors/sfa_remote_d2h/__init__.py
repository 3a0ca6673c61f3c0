"""``SfaRemoteD2HConnector``: decode pulls a request's KV from prefill while prefill computes.

Owns: the rendezvous, the wire protocol with its sessions, leases and deadlines, and which block is read into
which; secrets, keys and allowed hosts. `wire`, `facts`, `hosts`, `ports`, `counts`, `producer`, `consumer`,
`introductions` and `pending` are pure; `worker_p` and `worker_d` run them on sockets and a transfer engine,
with `reads`, `connection_gate` and `curve`; vLLM calls `scheduler` and `connector`, where `params` reads
requests and `rendezvous` posts to the proxy. docs/pd.md describes all of it.
Never touches: pools and rows (``sparse``), streams (``runtime``), how bytes move (``transfer``).
"""
