"""Prompts in, texts out, without HTTP: tokenizer, detokenizer and chat templates, which endpoints and LLM use."""
