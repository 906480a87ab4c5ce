"""Vectors and scores of texts: requests are converted to prompts, and the engine's outputs to JSON."""
