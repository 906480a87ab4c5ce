"""Builds the arrays of a step from the scheduled tokens."""
