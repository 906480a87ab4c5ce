"""The version, in the one place that everything else reads: metadata of the installed package, or the checkout's."""

import importlib.metadata

try:
    VERSION = importlib.metadata.version("oarlock")
except importlib.metadata.PackageNotFoundError:  # a checkout that was not installed
    VERSION = "0.1.0"
