"""Recurrent operations: kernels that `workers/recurrent/triton_operations.py` launches."""
