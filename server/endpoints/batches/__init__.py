"""Batches of requests in files: for `oarlock batch`, and for `/v1/files` and `/v1/batches`."""
