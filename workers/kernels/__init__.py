"""Oarlock's own kernels, one folder per device type."""
