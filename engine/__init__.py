"""The engine: schedules requests as token ids and KV blocks. Knows no text, HTTP or tensors."""
