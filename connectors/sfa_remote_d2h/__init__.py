"""``SfaRemoteD2HConnector``: decode pulls a request's KV from prefill while prefill computes.

Owns: the rendezvous, the wire protocol with its sessions, leases and deadlines, and which block is read into
which. `wire`, `ports`, `counts`, `producer`, `consumer` and `pending` are pure; `worker_p` and `worker_d` run
them on sockets and a transfer engine; `scheduler` and `connector` are what vLLM calls. docs/pd.md tells the
whole story.
Never touches: pools and rows (``sparse``), streams (``runtime``), how bytes move (``transfer``).
"""
