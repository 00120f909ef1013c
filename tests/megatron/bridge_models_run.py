"""``-m tests.megatron.bridge_models_run SCRIPT …``: `bridge_run`, with transformers."""

import sys

from tests.megatron import bridge_emulated

if __name__ == "__main__":
    bridge_emulated.install(imports_models=True)

    from megatron_hexi.run import main

    main(sys.argv[1:])
