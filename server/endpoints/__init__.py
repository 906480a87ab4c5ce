"""Endpoints, each in a folder with its route, schema, serving class and writer. Parts that several share are at the
root.

A `schema.py` defines the contents of a body. It imports only `strict_model.py` and other schemas, so that every folder
may read it.
"""
