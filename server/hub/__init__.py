"""From a model's name to its files: directories, GGUF, the cache, fetching from the hub. It never reads weights."""
