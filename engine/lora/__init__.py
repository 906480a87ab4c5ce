"""LoRA adapters: their names and contents, host memory and slots of the ranks."""
