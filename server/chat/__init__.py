"""Chat requests: rendering messages to a prompt, the grammar of a constrained response, and parsing the output text."""
