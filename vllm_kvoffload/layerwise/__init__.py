"""Layerwise prefill: whole layers through a few device buffers.

Owns `prefill_stream`, which streams prefixes from the host pool on an aggregated engine, and, for prefill
engines with a store, `buffer_plan` (which layers share memory), `slot_gate` (when it may be written again)
and `pipeline` (a step's loads and saves). A buffer is filled again only after whoever needs it is done.
Never touches attention, the hot pool, who may run, or where a store keeps an object: it gets a step's
requests.
"""
