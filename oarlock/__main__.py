"""Entry point of `python -m oarlock`, which is the `oarlock` command."""

import sys

from oarlock.server.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
