"""``python -m megatron_hexi.convert``: the command line of the conversion."""

from __future__ import annotations

import argparse
import contextlib
import logging
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_hexi.errors import HexiError, user_errors

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
    with user_errors():
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
    there.add_argument("hf_folder", metavar="HF_FOLDER", type=Path, help="with config.json and *.safetensors")
    back = directions.add_parser("megatron-to-hf", help="write model.safetensors, config.json and tokenizer")
    back.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        type=Path,
        help="a folder that --save wrote, or an iteration in it",
    )
    back.add_argument(
        "--like",
        metavar="HF_FOLDER",
        type=Path,
        required=True,
        help="whose config.json, and tokenizer if it is there, belong to the model",
    )
    for direction in (there, back):
        direction.add_argument("out", metavar="OUT", type=Path, help="a folder that is not there yet")
    return parser


@contextlib.contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
    """Yield a temporary folder; it takes its final name when complete, and is removed on an error.

    Raises:
        HexiError: something has that name, or the folder around it cannot be written to.
    """
    if out.exists():
        raise HexiError(f"{out}: is there already; choose another name, or remove it")
    try:
        made = Path(tempfile.mkdtemp(prefix=".hexi-", dir=out.absolute().parent))
    except OSError as problem:
        raise HexiError(
            f"{out.absolute().parent}: cannot be written to ({problem.strerror}); make it first"
        ) from None
    try:
        made.chmod(0o755)
        yield made
        made.rename(out)
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
