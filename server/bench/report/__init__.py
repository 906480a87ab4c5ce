"""A result as a table for the terminal and as one HTML file."""
