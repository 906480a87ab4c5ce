"""The version, defined only here: from the metadata of the installed package, or the checkout's own."""

import importlib.metadata

try:
    VERSION = importlib.metadata.version("oarlock")
except importlib.metadata.PackageNotFoundError:  # a checkout that was not installed
    VERSION = "0.1.0"
