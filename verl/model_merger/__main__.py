"""`python -m verl.model_merger merge|test`: write a checkpoint as a Hugging Face model, or compare it with one.

Exit code 0: done, or no difference; 1: an error or differences, which are logged.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from verl.config.command_line import program_name
from verl.model_merger import BACKENDS, DTYPES, LORA, MergeOptions
from verl.utils.logging_setup import setup_logging

logger = logging.getLogger("verl.model_merger")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    command_line = argparse.ArgumentParser(
        prog=program_name("verl.model_merger"),
        description="Convert checkpoints to Hugging Face models.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    option, flag = command_line.add_argument, "store_true"
    option(
        "command", choices=("merge", "test"), help="write --target_dir, or compare with --test_hf_dir tensor by tensor"
    )
    option("--backend", required=True, choices=BACKENDS, help="framework that wrote the checkpoint")
    option("--local_dir", required=True, help="checkpoint folder: global_step_N/actor, or one of another framework")
    option("--target_dir", help="folder of the merged model; with test: compare this folder instead of the checkpoint")
    option("--test_hf_dir", help="folder of a Hugging Face model to compare with")
    option("--hf_upload_path", help="repository of the Hugging Face hub to upload the model to")
    option("--private", action=flag, help="make a newly created repository private")
    option("--tie-word-embedding", action=flag, help="tie the output head to the embedding, regardless of config.json")
    option(
        "--is-value-model",
        action=flag,
        help="the checkpoint is a critic; it is written as a token classifier with one label",
    )
    option("--trust-remote-code", action=flag, help="execute model code in the checkpoint")
    option("--use_cpu_initialization", action=flag, help="accepted for compatibility; the CPU is always used")
    option(
        "--lora",
        choices=LORA,
        default="merge",
        help="LoRA adapters: merge them into the weights, or write them alone in peft's format",
    )
    option("--lora-alpha", type=float, help="lora_alpha of the adapters, if the checkpoint does not contain it")
    option(
        "--base-model",
        help="folder or hub name of the base model: to merge adapters into it, or if the checkpoint has no config.json;"
        " it also provides the tokenizer if the checkpoint has none, and preprocessing files that the checkpoint lacks",
    )
    option("--dtype", choices=DTYPES, default="auto", help="dtype of the files; auto: that of config.json")
    option("--tolerance", type=float, default=0.0, help="largest difference of values that a comparison accepts")
    option("--max-shard-size", default="5GB", help="maximum size of a file")
    option("--overwrite", action=flag, help="replace the contents of --target_dir")
    return command_line


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    command_line = parser()
    options = vars(command_line.parse_args(arguments))
    command = options.pop("command")
    options.pop("use_cpu_initialization")
    required = {"merge": "target_dir", "test": "test_hf_dir"}[command]
    if options[required] is None:
        command_line.error(f"{command} requires --{required}")
    if options["private"] and not options["hf_upload_path"]:
        command_line.error("--private requires --hf_upload_path")
    if command == "test" and options["hf_upload_path"]:
        command_line.error("--hf_upload_path: test writes nothing to upload. Use merge, which can compare, too")
    setup_logging()
    from verl.model_merger.merging import merge, test

    try:
        differences = (merge if command == "merge" else test)(MergeOptions(**options))
    except (ValueError, OSError) as error:
        logger.error("%s", error)
        return 1
    for line in differences:
        logger.error("%s", line)
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
