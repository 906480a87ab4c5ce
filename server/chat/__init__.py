"""Conversations: the prompt made of messages, the grammar an answer is bound to, and the parsing of its text."""
