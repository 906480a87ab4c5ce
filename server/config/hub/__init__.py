"""Fetching a checkpoint from the hub, in a process of its own that can be cancelled and resumed."""
