"""How quantised checkpoints store weights, as their settings say it: one file for each method. Torch-free."""
