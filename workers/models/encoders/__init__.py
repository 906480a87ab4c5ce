"""Encoders: models that read a whole text at once, with attention in both directions, and compute vectors or scores."""
