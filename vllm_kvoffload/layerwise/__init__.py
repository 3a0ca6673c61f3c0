"""Layerwise prefill: whole layers through a few device buffers.

Owns `prefill_stream`, which streams prefixes from the host pool on an aggregated engine. A buffer is filled
again only after the layer that used it is done.
Never touches attention, the hot pool, or who may run: it gets a step's requests and hands out filled buffers.
"""
