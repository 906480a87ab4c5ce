"""`oarlock doctor`: what this machine has, what a server would choose on it, and what stands in its way."""
