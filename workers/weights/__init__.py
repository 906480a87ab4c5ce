"""Sources of a rank's weights: safetensors files, GGUF files, or deterministic noise."""
