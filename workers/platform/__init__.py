"""Description of this machine (processor features, cores, memory, network), and the sizes of dtypes."""
