"""Who runs next, and which blocks they hold. Pure: no clock, no arrays, no chance."""
