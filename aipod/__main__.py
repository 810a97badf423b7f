"""`python -m aipod`."""

import sys

from aipod.cli import main

if __name__ == "__main__":
    sys.exit(main())
