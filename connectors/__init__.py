"""KV connectors that vLLM loads by name, imported as ``vllm_kvoffload.connectors``.

Owns: the scheduler and worker halves of ``SfaRemoteD2HConnector`` (decode pulls KV from prefill), of
``AscendStoreConnector`` (layerwise prefill from and to a store), their composition in ``multi``, and the
``guard`` that confines errors to one request; the wire protocol, handshake, leases and deadlines between two
engines.
Never touches: device memory layout (``geometry``), hot or host pools (``sparse``), streams (``runtime``), or
HTTP (``proxy``).

The folder stands at the top of the repository; ``vllm_kvoffload/connectors`` is a relative link to it.
"""
