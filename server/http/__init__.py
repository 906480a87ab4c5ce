"""HTTP for all requests: connections, TLS, middleware, reading of bodies, errors, server-sent events, OpenAPI.

Knows the schemas of request bodies. Does not know any endpoint.
"""
