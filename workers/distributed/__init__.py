"""How a step reaches the ranks: shared memory and one wake-up byte per reader."""
