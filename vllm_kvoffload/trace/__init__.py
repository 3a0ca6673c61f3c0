"""Traces of an indexer's top-k ids per step: recording, generation, storage and policy simulation.

Owns: `format` (the file: header, records, number coding), `writer` and `reader` (one file, in steps),
`recorder` (in the engine: a copy and a background thread), `generator` and `suite` (synthetic traces that fit
published hit rates), `streams` (a trace as input of a policy), `policies` (reference policies in numpy),
`simulator` (these and the real plan) and `plot`. Never touches pools, KV or vLLM. Only the simulator's plan
needs torch and the compiled operators, which it imports when it runs.
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
