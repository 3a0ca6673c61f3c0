"""The `kvoffload` command: `main` has the subcommands, each other module one subcommand's work.

What it says about sizes and rules comes from geometry, config and sparse.capacity, about traces from trace.
No module here imports torch or vLLM by being imported, so `kvoffload size` runs on any machine; of the
subcommands here only `trace simulate` needs torch.
"""
