"""Attention over the paged KV cache: one protocol, a slow reference that judges, and faster backends."""
