"""Checking a model's numbers, layer by layer, against transformers' own. Loads both in turn, never serves."""
