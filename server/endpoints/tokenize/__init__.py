"""Tokens of texts and conversations, and texts of tokens: `/tokenize` and `/detokenize`."""
