"""Endpoints, each in a folder with its route, schema, serving class and writer. Shared parts are at the root.

A `schema.py` defines the contents of a body. It imports only `strict_model.py` and other schemas, so every folder may
read it.
"""
