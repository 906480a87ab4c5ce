"""The scheduler in virtual time: no ranks, no tensors."""
