"""Endpoints, each in a folder with its route, serving class and writer. Shared parts are at the root."""
