"""The workers speak tensors: weights, KV memory, kernels, collectives. They know nothing of requests, text or HTTP."""
