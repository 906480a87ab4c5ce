"""How nodes, the hosts of one group of ranks, find each other, prove that they belong together, and talk."""
