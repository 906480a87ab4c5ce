"""What happened to each request in the engine."""
