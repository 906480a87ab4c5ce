"""Comparison of a model's values, layer by layer, with transformers' own. Loads both in turn, never serves."""
