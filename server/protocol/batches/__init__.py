"""The requests of `/v1/files` and `/v1/batches`."""
