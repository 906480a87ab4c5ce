"""Recording the steps of an engine, and running them again."""
