"""What each model family is, as plain values, and the one decoder that runs them."""
