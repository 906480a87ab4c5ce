"""The server handles text: HTTP, JSON, SSE, the tokenizer and stop strings. It knows nothing of blocks, tensors or
devices.
"""
