"""`oarlock bench`: the load, the client, the measures and the reports. Speaks HTTP and nothing of the server's."""
