"""What this machine has: processor features, cores, memory; and the sizes of number types."""
