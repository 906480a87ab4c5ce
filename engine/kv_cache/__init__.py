"""KV blocks outside the pool: their hashes, the events published about them, and the tiers that keep evicted ones."""
