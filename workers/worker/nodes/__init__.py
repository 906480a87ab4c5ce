"""Ranks of one host or of several: their processes, membership, messages and ends."""
