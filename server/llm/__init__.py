"""Prompts in, texts out, without HTTP: what the endpoints and the offline interface use."""
