"""Model families as plain values read from `config.json`, and the one decoder that runs them all."""
