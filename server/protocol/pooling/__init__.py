"""The wire types of the routes that answer with vectors and scores."""
