"""`python -m verl.model_merger merge|test`: a checkpoint as a model that transformers loads, and whether it is one.

Exit code 0: done, or no difference; 1: the reason, or every difference, is told.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from verl.model_merger import BACKENDS, DTYPES, LORA, MergeOptions
from verl.utils.logging_setup import setup_logging

logger = logging.getLogger("verl.model_merger")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m verl.model_merger",
        description="Checkpoints as Hugging Face models.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    say, on = made.add_argument, "store_true"
    say("command", choices=("merge", "test"), help="write --target_dir, or compare with --test_hf_dir tensor by tensor")
    say("--backend", required=True, choices=BACKENDS, help="who wrote the checkpoint")
    say("--local_dir", required=True, help="the checkpoint: global_step_N/actor, or a folder of another framework")
    say("--target_dir", help="the model; test: if it is merged already")
    say("--test_hf_dir", help="a model in Hugging Face form to compare with")
    say("--hf_upload_path", help="a repository of the Hugging Face hub to put the model into")
    say("--private", action=on, help="where that is made anew, only you see it")
    say("--tie-word-embedding", action=on, help="the output head is the embedding, whatever config.json says")
    say("--is-value-model", action=on, help="a critic: written as a token classifier with one label")
    say("--trust-remote-code", action=on, help="run model code that comes with the checkpoint")
    say("--use_cpu_initialization", action=on, help="for scripts that set it: nothing here uses another device")
    say("--lora", choices=LORA, default="merge", help="adapters: added to the weights, or alone, as peft loads them")
    say("--lora-alpha", type=float, help="where the checkpoint does not say it")
    say("--base-model", help="folder or hub name: weights under adapters, config and tokenizer where there are none")
    say("--dtype", choices=DTYPES, default="auto", help="of the files; auto: what config.json says")
    say("--tolerance", type=float, default=0.0, help="by how much values may differ in a comparison")
    say("--max-shard-size", default="5GB", help="of one file")
    say("--overwrite", action=on, help="replace what is in --target_dir")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    made = parser()
    given = vars(made.parse_args(arguments))
    command = given.pop("command")
    given.pop("use_cpu_initialization")
    needed = {"merge": "target_dir", "test": "test_hf_dir"}[command]
    if given[needed] is None:
        made.error(f"{command} needs --{needed}")
    if given["private"] and not given["hf_upload_path"]:
        made.error("--private says who sees what --hf_upload_path uploads, and there is none")
    if command == "test" and given["hf_upload_path"]:
        made.error("test writes nothing that --hf_upload_path could upload. Use merge, which compares too")
    setup_logging()
    from verl.model_merger.merging import merge, test

    try:
        found = (merge if command == "merge" else test)(MergeOptions(**given))
    except (ValueError, OSError) as error:
        logger.error("%s", error)
        return 1
    for line in found:
        logger.error("%s", line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
