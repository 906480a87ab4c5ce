"""What runs the ranks of each node, and joins those of several."""
