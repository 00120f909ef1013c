"""Count how many launch scripts of public repositories ``hexi plan --model`` reads, and why others are not.

    python -m benchmarks.scripts_read slime=SLIME/scripts megatron=MEGATRON-LM/examples \
        tests=MEGATRON-LM/tests/functional_tests swift=MS-SWIFT/examples/megatron verl=VERL/examples

Takes checkouts of the repositories, none of whose files is kept here, and runs none of their scripts. Files
that start no training, and those of models that are no decoder of text, are counted apart.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from megatron_hexi.errors import HexiError
from megatron_hexi.models import read_model, read_terms

#: Models that are no decoders of text, by words of their files' paths or texts.
_OTHER_MODELS = re.compile(
    r"gpt-nemo|bert|(?<![a-z])t5|retro|mimo/|llava|multimodal|vlm|omni|_vl|-vl|InternVL|embedding|rerank|seq_cls|ict|orm|dino",
    re.IGNORECASE,
)
_NO_TRAINING = re.compile(
    r"export|infer|convert|generate|generation|quant|/conf/|server|benchmark/deepspeed|SBATCH|CONFIG.sh|env_setup"
)
_MODEL_NAME = re.compile(r"(?:--model|model\.path=|MODEL_PATH=|MODEL_ID=)\S*\s*\S*(?:VL|Omni)")
_MISTAKES = re.compile(r" \(\d+\) ")


def files_of(folder: Path) -> Iterator[Path]:
    """Yield the scripts, and the configurations of functional tests, below a folder."""
    yield from sorted((*folder.rglob("*.sh"), *folder.rglob("model_config.yaml")))


def kind_of_file(path: Path, folder: Path) -> str:
    """Return "counted", or why a file is counted apart."""
    name, text = str(path.relative_to(folder)), path.read_text(encoding="utf-8")
    if _OTHER_MODELS.search(name) or _MODEL_NAME.search(text):
        return "other models"
    is_training = re.search(r"--num[-_]layers|[-_]model[-_]parallel[-_]size|MODEL_ARGS|num-layers", text)
    if _NO_TRAINING.search(name) or not is_training:
        return "no training"
    return "counted"


def reasons(path: Path) -> list[str]:
    """Return why a file is not read; none: it is read."""
    try:
        read_model(str(path))
        read_terms(str(path))
    except HexiError as problem:
        told = str(problem).replace(str(path), "")
        mistakes = _MISTAKES.split(told)[1:] if "mistakes:" in told else [told]
        return [
            re.sub(r"^[^:]*?,? ?lines? [\d, …]+: |^: ", "", mistake).split(";")[0][:110]
            for mistake in mistakes
        ]
    return []


def main(words: list[str]) -> None:
    """Print a line for each source, and its reasons."""
    for word in words:
        source, _, name = word.partition("=")
        folder, kinds, found = Path(name), Counter[str](), Counter[str]()
        for path in files_of(folder):
            kind = kind_of_file(path, folder)
            told = reasons(path) if kind == "counted" else []
            if told and told[0].startswith("verl trains without Megatron"):
                kind, told = "no training", []
            kinds["read" if kind == "counted" and not told else kind if kind != "counted" else "refused"] += 1
            found.update(dict.fromkeys(told, 1))
            if told and "-v" in sys.argv:
                print("  ", path.relative_to(folder), *told, sep="\n      ")
        total = kinds["read"] + kinds["refused"]
        apart = ", ".join(f"{kinds[kind]} of {kind}" for kind in ("other models", "no training"))
        print(f"{source}: {kinds['read']} of {total} read ({apart} apart)")
        for reason, count in found.most_common(30):
            print(f"  {count:4} {reason}")


if __name__ == "__main__":
    main([word for word in sys.argv[1:] if word != "-v"])
