"""Tensor-parallel layers. Each can be built and called on its own; none reads a global."""
