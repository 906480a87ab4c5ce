"""Simulates the scheduler in virtual time: no ranks, no tensors."""
