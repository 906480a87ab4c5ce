"""A rank's part of keeping KV blocks beyond the pool: slots in host memory, and a directory of files."""
