"""Runs a rank's part of an encoder: whole texts in, vectors and scores out, no memory of keys and values."""
