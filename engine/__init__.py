"""The engine speaks tokens and blocks: it decides who runs next. It knows nothing of text, HTTP or tensors."""
