"""Decode steps as graphs of kernels that a device runs in one launch, and what they read and write."""
