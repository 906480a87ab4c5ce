"""Read a rank's part of the weights of quantised checkpoints: one file for each way of storing them."""
