"""Decides which requests run next, and applies the answers to steps. Pure: no clock, no randomness, no process."""
