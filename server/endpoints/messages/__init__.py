"""`/v1/messages`: Anthropic's format of a chat, translated to and from chat turns."""
