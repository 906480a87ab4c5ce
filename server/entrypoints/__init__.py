"""Entry points: the commands of `oarlock`, the server process that they start, and the offline interface."""
