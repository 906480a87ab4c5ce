"""From this rank's shard of the logits to token ids that do not depend on batch, row or number of ranks."""
