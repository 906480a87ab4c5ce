"""The C++ kernels, and the Python code that builds and calls them."""
