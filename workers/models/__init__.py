"""Model families as plain values read from `config.json`, and the decoder that runs all of them."""
