"""`python -m verl.inference.server --model PATH`: the embedded engine behind the OpenAI API. Without `--host`, only
this machine can connect.

Clients: `openai.OpenAI(base_url="http://127.0.0.1:8001/v1", api_key="any")`, or curl. A sequence classifier, such as a
reward model, is served as /v1/rewards and /classify. After SIGTERM or Ctrl-C, requests in flight get a grace period;
then the program ends with exit code 0. A second signal ends it at once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from verl.inference.serving import options_parser
from verl.utils.console import LINE, show_startup, startup_phase
from verl.utils.logging_setup import setup_logging
from verl.utils.resources import use_single_heap

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until a signal arrives. Returns exit code 2 if the options are invalid or the server cannot start.

    Help and errors of options appear before torch is imported, which takes seconds.
    """
    options = options_parser().parse_args(arguments)
    logger = setup_logging(console=LINE, with_time=True)
    logger.info("start-up: importing the server for %s", options.model)
    use_single_heap()
    with show_startup(), startup_phase("imports"):
        from verl.inference.serving.app import in_options
        from verl.inference.serving.program import serve
    try:
        serve(options)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"{in_options(str(error))}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
