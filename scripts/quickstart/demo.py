"""``make demo``, or ``.venv/bin/python scripts/quickstart/demo.py --help``."""

import sys
from pathlib import Path

# Scripts are not installed: they, and the package, are taken from the repository that this file lies in.
sys.path[0] = str(Path(__file__).resolve().parents[2])

from scripts.quickstart.main import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
