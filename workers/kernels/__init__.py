"""Kernels of our own, one folder per kind of device."""
