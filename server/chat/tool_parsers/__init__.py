"""Tool calls: which format a model writes them in, how to read it piece by piece, and how to force it."""
