"""The layerwise prefill/decode proxy, imported as ``vllm_kvoffload.proxy``.

Owns: the OpenAI-compatible HTTP surface in front of prefill and decode engines, the choice of an instance and
its load accounting, the prefill request's sanitiser, streaming, re-dispatch, health, ``/v1/metaserver``, TLS,
API keys, and the limits on what clients may use.
Never touches: torch, vLLM, or any KV data; it runs in a process of its own.

The folder stands at the top of the repository; ``vllm_kvoffload/proxy`` is a relative link to it.
"""
