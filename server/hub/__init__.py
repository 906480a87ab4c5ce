"""Resolution of model names to files: directories, GGUF, the cache, downloads from the hub. Never reads weights."""
