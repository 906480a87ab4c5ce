"""Structured output: compiles grammars, in a sandbox first, and computes the mask of each token."""
