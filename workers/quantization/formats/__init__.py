"""Formats in which quantised checkpoints store weights, read from their settings: one file a method. Torch-free."""
