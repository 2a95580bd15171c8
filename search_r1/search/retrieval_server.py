"""`python -m search_r1.search.retrieval_server`: alias of `python -m verl.search.server`."""

import sys

from verl.search.server import SearchServer, main

__all__ = ["SearchServer", "main"]

if __name__ == "__main__":
    sys.exit(main())
