"""Oarlock on Ray Serve: each replica of the application runs one whole `oarlock serve` and forwards requests to it."""
