"""HTTP: the FastAPI application, its middleware, routes and OpenAPI document, and the uvicorn server."""
