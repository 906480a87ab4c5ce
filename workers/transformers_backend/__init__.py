"""Model classes that have no page here: transformers computes them, with our attention, memory and matmuls."""
