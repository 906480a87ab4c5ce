"""From scheduled tokens to the arrays of one step."""
