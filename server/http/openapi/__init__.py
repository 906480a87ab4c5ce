"""The OpenAPI document and the pages made from it."""
