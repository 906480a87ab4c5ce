"""Formats in which linear weights are stored, read and multiplied. Knows no layer and no model family."""
