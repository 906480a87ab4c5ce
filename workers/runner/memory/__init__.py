"""Accounts for the memory of a rank's weights and steps, and refuses steps for which there is not enough."""
