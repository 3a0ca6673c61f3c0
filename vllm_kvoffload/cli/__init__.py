"""The `kvoffload` command: `main` defines the subcommands, each other module implements one.

Sizes and rules come from geometry, settings and sparse.capacity, traces from trace. Importing a module of
this package imports neither torch nor vLLM, so `kvoffload size` runs on any machine; of these subcommands
only `trace simulate` needs torch.
"""
