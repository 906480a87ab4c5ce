"""Structured output: grammars are compiled in a sandbox first, and decide a mask for each token."""
