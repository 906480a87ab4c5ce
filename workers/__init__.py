"""The workers deal with tensors: weights, KV memory, kernels, collectives. They do not know requests, text or HTTP."""
