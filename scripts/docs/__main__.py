"""``python -m scripts.docs``: write every generated page and drawing below docs/."""

from __future__ import annotations

from megatron_hexi.text_file import write_text_atomically
from scripts.docs.pages import DOCS, GENERATED


def main() -> None:
    """Write them, and say which of them changed."""
    for name, make in GENERATED.items():
        path, text = DOCS / name, make()
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.parent.mkdir(exist_ok=True)
            write_text_atomically(path, text)
            print(f"wrote docs/{name}")


if __name__ == "__main__":
    main()
