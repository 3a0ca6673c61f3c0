"""The real torch binding of the AscendC operators, kernels on the CPU twin, for the emulated NPU."""
