"""The checks that `workers/preflight.py` makes before a rank starts, and what it resolves. Torch-free."""
