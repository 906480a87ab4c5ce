"""Decides which requests run next, and applies the results of steps. Pure: no clock, no randomness, no process."""
