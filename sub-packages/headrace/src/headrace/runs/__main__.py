"""``python -m headrace.runs``."""

import sys

from headrace.runs.cli import main

if __name__ == "__main__":
    sys.exit(main())
