"""Text generation without HTTP, used by endpoints and `LLM`: tokenizer, detokenizer, chat templates, completions."""
