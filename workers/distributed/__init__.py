"""Communication with and between ranks: the ring for steps, control sockets, rendezvous and collectives."""
