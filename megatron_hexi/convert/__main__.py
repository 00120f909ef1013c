"""``python -m megatron_hexi.convert``: the command line of the conversion."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_hexi.errors import HexiError, user_errors
from megatron_hexi.standard_output import standard_output
from megatron_hexi.text_file import writing_problem

_EXAMPLE = """example:
  python -m megatron_hexi.convert hf-to-megatron Llama-3.1-8B weights
  python -m megatron_hexi.torchrun … -m megatron_hexi.pretrain_gpt $(cat weights/model.args) \\
      --load weights --finetune --save trained …
  python -m megatron_hexi.convert megatron-to-hf trained Llama-trained --like Llama-3.1-8B
"""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the conversion that the command line asks for.

    Raises:
        SystemExit: the user's input is wrong (exit code 2).
    """
    words = _parser().parse_args(argv)
    with user_errors(), standard_output():
        from megatron_hexi.platform import select_platform

        select_platform("cpu").install()  # before Megatron is imported
        # Megatron and torch tell at length what training would lack, and what they will rename.
        logging.disable(logging.WARNING)
        with warnings.catch_warnings(action="ignore"), _new_folder(words.out) as out, _one_rank():
            from megatron_hexi.convert import hf_to_megatron, megatron_to_hf

            if words.direction == "hf-to-megatron":
                hf_to_megatron.convert(words.hf_folder, out)
            else:
                megatron_to_hf.convert(words.checkpoint, words.like, out)
        print(f"written: {words.out}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m megatron_hexi.convert",
        description="Convert Llama, Mistral, Mixtral, Qwen2, Qwen3, DeepSeek-V3, Kimi-K2, GLM-4.5 and "
        "gpt-oss between Hugging Face's format and Megatron's torch_dist checkpoints. One process on a CPU; "
        "the whole model is in memory.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    directions = parser.add_subparsers(dest="direction", required=True)
    there = directions.add_parser("hf-to-megatron", help="write a checkpoint, and model.args beside it")
    there.add_argument(
        "hf_folder", metavar="HF_FOLDER", type=_path, help="with config.json and *.safetensors"
    )
    back = directions.add_parser("megatron-to-hf", help="write model.safetensors, config.json and tokenizer")
    back.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        type=_path,
        help="a folder that --save wrote, or an iteration in it",
    )
    back.add_argument(
        "--like",
        metavar="HF_FOLDER",
        type=_path,
        required=True,
        help="whose config.json, and tokenizer if it is there, belong to the model",
    )
    for direction in (there, back):
        direction.add_argument("out", metavar="OUT", type=_path, help="a folder that is not there yet")
    return parser


def _path(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("is empty (is a variable not set?); give a folder")
    return Path(text)


@contextlib.contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
    """Yield a temporary folder, which takes its final name when complete, and is removed on an error.

    Raises:
        HexiError: something has that name, or the folder around it cannot be written to.
    """
    try:
        with contextlib.suppress(FileNotFoundError):
            os.lstat(out)
            raise HexiError(f"{out}: is there already; choose another name, or remove it")
        made = Path(tempfile.mkdtemp(prefix=".hexi-", dir=out.absolute().parent))
    except OSError as problem:
        raise HexiError(
            f"{out}: cannot be made in {out.absolute().parent} ({problem.strerror}); choose another folder"
        ) from None
    try:
        made.chmod(0o755)
        yield made
        made.rename(out)
    except Exception as problem:
        if isinstance(problem, HexiError) or (reason := writing_problem(made)) is None:
            raise
        raise HexiError(f"{out}: cannot be written ({reason}); make room there, or choose another") from None
    finally:
        shutil.rmtree(made, ignore_errors=True)


@contextlib.contextmanager
def _one_rank() -> Iterator[None]:
    """Run in a gloo process group of this process alone, which Megatron's checkpoints need."""
    import torch.distributed

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


# Saving a checkpoint spawns a process that imports this module again: nothing may happen then.
if __name__ == "__main__":
    main()
