"""LoRA adapters: their files and settings, and the low-rank updates of a model's linear layers."""
