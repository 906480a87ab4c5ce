"""Kernels in Triton, for CUDA devices. On the CPU they run in its interpreter, for tests. Imported where needed."""
