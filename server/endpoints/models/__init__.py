"""The served names: `/v1/models`."""
