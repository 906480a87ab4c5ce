"""What goes between ranks that share no memory: TCP sockets, sums over the nodes of a stage, rows between stages."""
