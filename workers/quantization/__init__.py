"""Forms in which weights of products are stored, read and multiplied. Knows no layer and no family."""
