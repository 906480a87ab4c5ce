"""The wire types of `/v1/messages`."""
