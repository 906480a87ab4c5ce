"""Files that describe a model or hold its weights: their names, headers and tensors, without reading the tensors."""
