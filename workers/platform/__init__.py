"""Facts of the machine: processor, cores, memory."""
