"""Prompts in, texts out, without HTTP: the offline `LLM`, and what the endpoints use."""
