"""What differs between devices: how vLLM is extended, and the kernels of attention and indexer.

Owns one package per platform (`cpu`, `ascend`), what they have in common (`engine`, `parts`), and `refusal`
(ending a start-up with one line).
Never touches pools or plans: those are above, in `sparse` and `ops`, and the same for every platform.
"""
