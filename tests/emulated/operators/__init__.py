"""The real torch binding of the AscendC operators, with their kernels on the CPU twin, for the emulated NPU."""
