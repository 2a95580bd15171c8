"""`python -m verl`: the same as the console script `verl`."""

import sys

from verl.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
