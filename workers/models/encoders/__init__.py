"""Encoders: models that read a whole text at once, each token all others, and make vectors or scores of it."""
