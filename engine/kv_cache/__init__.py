"""KV blocks: the sequences that hold them, the prefix cache and its events, and tiers for evicted blocks. No
tensors."""
