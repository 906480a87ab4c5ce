"""A rank's part of KV offload: slots in host memory, and a directory of files."""
