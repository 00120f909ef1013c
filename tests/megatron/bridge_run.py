"""``-m tests.megatron.bridge_run SCRIPT …``: `megatron_hexi.run` where Bridge is emulated."""

import sys

from tests.megatron import bridge_emulated

if __name__ == "__main__":
    bridge_emulated.install()

    from megatron_hexi.run import main

    main(sys.argv[1:])
