"""`python -m verl.viewer FOLDER…`: the same as `verl view`."""

import sys

from verl.viewer.cli import main

if __name__ == "__main__":
    sys.exit(main())
