"""The table of model classes: which of transformers' classes are served, by which code, and how exactly."""
