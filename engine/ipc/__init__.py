"""Messages between the engine process and the server: frames over a socket pair."""
