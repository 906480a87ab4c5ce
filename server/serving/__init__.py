"""A checked request to its response: one file per endpoint on a common base."""
