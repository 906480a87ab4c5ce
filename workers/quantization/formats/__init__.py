"""Formats in which quantised checkpoints store weights, read from their settings: one file per method. Torch-free."""
