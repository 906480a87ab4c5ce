"""The engine: schedules requests as token ids and KV blocks. Does not know text, HTTP or tensors."""
