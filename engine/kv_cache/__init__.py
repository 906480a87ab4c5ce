"""KV blocks: which sequences hold them, the prefix cache and its events, and tiers for evicted ones. No tensors."""
