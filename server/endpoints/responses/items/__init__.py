"""Input items of `/v1/responses`."""
