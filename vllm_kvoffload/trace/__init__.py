"""Which tokens an indexer chose, step by step: recorded, made up, stored, and judged by.

Owns: `format` (the file: header, records, number coding), `writer` and `reader` (one file, in steps),
`recorder` (the engine's side: a copy and a background thread), `generator` and `suite` (synthetic traces
that fit published hit rates), `streams` (what a policy sees of a trace), `policies` (reference policies in
numpy), `simulator` (those beside the real plan) and `plot`.
Never touches pools, KV or vLLM: an engine hands it chosen ids, and it hands nothing back. Only the
simulator's plan needs torch and the compiled operators; they are imported when it runs.
"""

from vllm_kvoffload.trace.format import TraceError, TraceHeader
from vllm_kvoffload.trace.reader import RequestStep, TraceReader, TraceStep
from vllm_kvoffload.trace.recorder import TraceRecorder
from vllm_kvoffload.trace.writer import TraceWriter

__all__ = [
    "RequestStep",
    "TraceError",
    "TraceHeader",
    "TraceReader",
    "TraceRecorder",
    "TraceStep",
    "TraceWriter",
]
