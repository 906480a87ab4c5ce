"""Records the steps of an engine, and replays them."""
