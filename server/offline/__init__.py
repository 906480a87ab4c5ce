"""Generation without HTTP: the Python interface `LLM`, and batches of requests in files."""
