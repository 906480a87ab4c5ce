"""Sampling of token ids from logits sharded by vocabulary, independent of the batch, the row and the rank count."""
