"""Checks and resolution of settings for `workers/preflight.py`, before a rank starts. Torch-free."""
