"""One endpoint family per file, thin: read, hand over, answer."""
