"""The `kvoffload` command: `main` has the subcommands, each other module one subcommand's work.

It only reads files and prints; what it says about sizes and rules comes from geometry, config and
sparse.capacity. No module here imports torch or vLLM, so `kvoffload size` runs on any machine.
"""
