"""Layerwise prefill on engines with a store: whole layers through a few device buffers.

Owns `buffer_plan` (which layers share memory), `slot_gate` (when it may be written again) and `pipeline` (a
step's loads and saves). A buffer is filled again only after everything that reads it is done. Never touches
attention, the hot pool, scheduling, or where a store keeps an object: it gets a step's requests.
"""
