"""`oarlock doctor`: the machine's resources, the choices a server would make on it, and problems with their fixes."""
