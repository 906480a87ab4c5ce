"""Several engines of one model: each one's life, what each has cached, and which of them a request goes to."""
