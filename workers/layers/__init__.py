"""Sharded building blocks. Each can be built and called on its own; none reads a global."""
