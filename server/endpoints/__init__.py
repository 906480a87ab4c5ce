"""Endpoints: a folder for each with its route, schema, serving and writer; at the root the parts that several share.

A `schema.py` says what a body may hold. It imports nothing but `strict_model.py` and other schemas, so that every room
may read it.
"""
