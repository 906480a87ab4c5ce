"""How quantised checkpoints store weights, as plain values read from their settings: one file for each method. Torch-free."""
