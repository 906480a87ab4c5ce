"""Decides which requests run next, and which KV blocks they hold. Pure: no clock, no randomness."""
