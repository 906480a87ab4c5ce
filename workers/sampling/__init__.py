"""Samples token ids from logits sharded by vocabulary; they do not depend on batch, row or number of ranks."""
