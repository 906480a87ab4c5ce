"""Models in one GGUF file, or in several that belong together: llama.cpp's format."""
