"""The workers' counters: sparse decode offload, and both sides of a transfer from prefill to decode."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from vllm_kvoffload.metrics.layout import Field, FieldSet, Histogram

OFFLOAD = FieldSet(
    "offload",
    (
        Field("decode_steps", "counter", "Steps with at least one decoding request."),
        Field("hits", "counter", "Selected rows found in the hot pool, over all index groups."),
        Field("misses", "counter", "Selected rows fetched from the host pool, over all index groups."),
        Field("new_rows", "counter", "Rows of tokens computed in the step that attended to them."),
        Field("displaced", "counter", "Rows that took a slot outside their own set."),
        Field("fetched_bytes", "counter", "Bytes of missing rows copied from the host pool."),
        Field("prefill_bytes", "counter", "Bytes of prefixes streamed from the host pool for prefill."),
        Field("written_bytes", "counter", "Bytes of new rows stored into the host pool."),
        Field("device_bytes", "gauge", "Device memory the offload holds: hot pools, tables, buffers."),
        Field(
            "device_bytes_without_offload",
            "gauge",
            "Device memory the same KV blocks would need without the offload.",
        ),
        Field("host_pool_bytes", "gauge", "Size of the host pool that this worker has mapped."),
        Field("kv_blocks", "gauge", "KV blocks the scheduler can hand out."),
        Field("live_rows", "gauge", "Requests that hold a partition of the hot pools."),
    ),
)


class TransferEnd(str, Enum):
    """Outcome of a transfer on prefill."""

    FINISHED = "finished"  # decode has read it
    CANCELLED = "cancelled"  # decode no longer needs it
    ABORTED = "aborted"  # the engine freed the blocks for good
    PREEMPTED = "preempted"  # the engine freed the blocks and will compute the request again
    EXPIRED = "expired"  # no heartbeat within the lease
    REFUSED = "refused"  # decode refuses to work with this engine
    RESTARTED = "restarted"  # decode has restarted since the transfer began
    UNREACHABLE = "unreachable"  # decode's address is unusable, or the connection limit is reached


class ReceiveFailure(str, Enum):
    """Why decode failed to receive a request."""

    ABORTED = "aborted"  # the engine aborted the request
    RENDEZVOUS = "rendezvous"  # the metaserver is unreachable or answered with an error
    PREFILL = "prefill"  # prefill gave up, stopped answering or restarted
    READ = "read"  # reading failed
    MISMATCH = "mismatch"  # prefill's model, layout or published metadata doesn't match
    DEADLINE = "deadline"  # the deadline passed


RECEIVE_PHASES = ("waiting", "reading", "ending")

RECEIVE_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


def _each(field: Field, label: str, values: Iterable[str]) -> tuple[Field, ...]:
    return tuple(Field(field.name, field.kind, field.help, (label, value)) for value in values)


def receive_seconds() -> Histogram:
    """An empty histogram for the series of receive durations."""
    return Histogram("receive_seconds", RECEIVE_BOUNDS_S)


_ERRORS = Field("control_errors", "counter", "Errors that the control thread caught, and went on.")
_REFUSED = Field("frames_refused", "counter", "Frames that were no message, or from an unauthenticated peer.")
_PEERS = Field("peer_ranks", "gauge", "Ranks of the other engine that this one is in touch with.")

PREFILL = FieldSet(
    "prefill",
    (
        Field("open_transfers", "gauge", "Requests whose blocks decode may read."),
        Field("kept_requests", "gauge", "Requests that are done here, and whose blocks are kept for decode."),
        Field("transfers_opened", "counter", "Transfers begun: one each time a request is computed."),
        *_each(
            Field("transfers_closed", "counter", "Transfers ended, by how."),
            "end",
            [end.value for end in TransferEnd],
        ),
        _PEERS,
        _REFUSED,
        _ERRORS,
    ),
)

DECODE = FieldSet(
    "decode",
    (
        *_each(Field("receives", "gauge", "Requests waiting for their KV."), "phase", RECEIVE_PHASES),
        Field("receives_started", "counter", "Requests whose blocks were allocated to be received."),
        Field("receives_done", "counter", "Requests received."),
        *_each(
            Field("receives_failed", "counter", "Requests not received, by reason."),
            "reason",
            [failure.value for failure in ReceiveFailure],
        ),
        Field("receive_retries", "counter", "Failed transfers whose requests then waited for another one."),
        Field("pulled_bytes", "counter", "Bytes read from prefill."),
        *receive_seconds().fields("Seconds from the allocation of a request's blocks until it is received."),
        _PEERS,
        _REFUSED,
        Field("unauthenticated_closed", "counter", "Connections closed that never introduced themselves."),
        _ERRORS,
    ),
)

STORE = FieldSet(
    "store",
    (
        Field("store_loaded_bytes", "counter", "Bytes of prefixes that layers loaded from the store."),
        Field("store_saved_bytes", "counter", "Bytes of new rows that layers saved to the store."),
        Field(
            "store_needed_bytes",
            "counter",
            "The least bytes to be moved: new rows once, prefixes that a layer lacks once a step.",
        ),
        Field("store_prompt_tokens", "counter", "Tokens computed, and tokens found in the store instead."),
        Field("store_hit_tokens", "counter", "Tokens found in the store instead of computed."),
        Field("store_lost_requests", "counter", "Requests whose KV could not be loaded, or not be saved."),
        Field("store_wait_us", "counter", "Microseconds that layers waited for their memory."),
        Field("store_pinned_objects", "gauge", "Objects of the store that running requests keep."),
        Field("layer_buffer_bytes", "gauge", "Device memory of the layers' buffers."),
        Field("layer_buffer_bytes_unshared", "gauge", "Device bytes of the same blocks without sharing."),
    ),
)

FIELD_SETS = {fields.name: fields for fields in (OFFLOAD, PREFILL, DECODE, STORE)}
