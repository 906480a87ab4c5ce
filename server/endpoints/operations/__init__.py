"""Operation of a running server: health, metrics, live state, capabilities, explained requests, admin."""
