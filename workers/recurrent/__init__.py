"""Recurrent layers: states in slots, and the operations on them."""
