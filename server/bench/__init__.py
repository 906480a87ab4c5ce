"""`oarlock bench`: the load, the client, the measures and the reports. Reaches the server only over HTTP."""
