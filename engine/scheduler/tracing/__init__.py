"""Traces of requests and the log of steps in the engine."""
