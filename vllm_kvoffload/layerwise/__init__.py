"""Layerwise prefill on engines with a store: layers take turns in a few device buffers.

Owns `buffer_plan` (which layers share memory), `slot_gate` (when it may be overwritten) and `pipeline` (a
step's loads and saves). A buffer is refilled only after all of its readers have finished. Never touches
attention, the hot pool, scheduling or the placement of objects in a store: its input is a step's requests.
"""
