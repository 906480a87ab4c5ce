"""Bodies of requests, field for field: each schema defines the contents of one body and its limits."""
