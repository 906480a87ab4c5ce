"""The server speaks text: HTTP, JSON, SSE, tokenizer, stop strings. It knows nothing of blocks, tensors or devices."""
