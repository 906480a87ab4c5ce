"""Describes this machine: processor features, cores, memory; and the sizes of number types."""
