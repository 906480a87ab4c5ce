"""`/v1/messages`: Anthropic's form of a chat, a translation to and from chat turns."""
