"""The C++ kernels, and the Python that builds and calls them."""
