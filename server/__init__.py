"""The server handles text: HTTP, JSON, SSE, the tokenizer, stop strings. It knows nothing of blocks, tensors or
devices.
"""
