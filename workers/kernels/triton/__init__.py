"""Triton kernels for CUDA devices. Tests run them on the CPU in Triton's interpreter. Imported only if needed."""
