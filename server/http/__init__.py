"""HTTP as every request meets it: connection, TLS, middleware, reading of bodies, errors, events, OpenAPI.

It knows the schemas of bodies and never an endpoint."""
