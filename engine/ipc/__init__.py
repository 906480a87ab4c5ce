"""How the engine process speaks with the server: framed messages over a socket pair."""
