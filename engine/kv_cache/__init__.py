"""KV blocks beside the pool itself: their hashes, what is told of them, and what is kept when the pool evicts them."""
