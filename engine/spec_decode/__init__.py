"""Drafts of next tokens, looked up in a sequence's own text and made only while they pay; the model checks each."""
