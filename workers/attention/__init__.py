"""Attention over the paged KV cache: one protocol, a slow reference implementation, and faster backends."""
