"""What happened to each of the last requests, and what that means."""
