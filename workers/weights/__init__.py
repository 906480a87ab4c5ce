"""Where a rank's weights come from: safetensors files, or deterministic noise."""
