"""C++ sources with a plain C interface, and what builds and loads them."""
