"""Named benchmarks: ``python -m benchmarks NAME… [--json]``.

Every figure stands beside its baseline, measured in the same run, turn and turn about, so that a busy machine
slows both. Owns measuring and reporting only; never part of the installed package.
"""
