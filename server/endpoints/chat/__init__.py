"""Chat completions: `/v1/chat/completions` and the rendering of its prompts."""
