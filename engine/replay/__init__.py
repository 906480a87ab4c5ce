"""Records the steps of an engine, and runs them again."""
