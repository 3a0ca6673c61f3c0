"""KV connectors that vLLM loads by name, imported as ``vllm_kvoffload.connectors``.

Owns: the scheduler and worker halves of ``SfaRemoteD2HConnector`` (decode pulls KV from prefill) and of
``AscendStoreConnector`` (layerwise prefill with a store), the ``multi`` connector that combines them, the
wire protocol between two engines, and the ``guard`` that confines an error to one request. Uses streams
and events of ``runtime`` to know when a layer is written, and geometry through ``EngineSettings``. Does
not own: pools and rows (``sparse``), how bytes move (``transfer``), HTTP (``proxy``).

The folder stands at the top of the repository; ``vllm_kvoffload/connectors`` is a relative link to it.
"""
