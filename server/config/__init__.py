"""Settings and where they come from: flags, environment, files; the model's path, its hub and its generation config."""
