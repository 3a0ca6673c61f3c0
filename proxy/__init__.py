"""The layerwise prefill/decode proxy, imported as ``vllm_kvoffload.proxy``.

Owns: the OpenAI-compatible HTTP API in front of prefill and decode engines, the choice of an engine and
its load accounting, the prefill request's sanitiser, streaming, re-dispatch, health probes,
``/v1/metaserver``, TLS, API keys, and the limits on clients. Does not use torch or vLLM and holds no KV
data; it runs in a process of its own.

The folder stands at the top of the repository; ``vllm_kvoffload/proxy`` is a relative link to it.
"""
