"""Formats whose calls hold values in a notation of their own, neither JSON nor plain text: Gemma's and Python's."""
