"""Forms in which the weights of products are stored, read and multiplied: one file for each."""
