"""A model in GGUF as a checkpoint in the Hugging Face layout: its description, tokenizer and chat template."""
