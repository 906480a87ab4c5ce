"""Text to ids and back: tokenizer, incremental detokenizer, chat templates in their sandbox."""
