"""Vectors of sequences, instead of tokens."""
