"""What a rank does of an encoder: whole texts in, vectors and scores out, no memory of keys and values."""
