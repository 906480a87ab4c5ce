"""The wire types, one file per endpoint, on a strict base, and how bodies and long answers are read and written."""
