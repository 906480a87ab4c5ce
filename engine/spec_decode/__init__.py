"""Draft tokens, looked up in a sequence's own text and made only while they pay off; the model verifies each."""
