"""The one-line import that installs our patches: ``import megatron_hexi.adaptor``, first in a script.

Importing this module chooses and installs the platform (``--hexi-platform``), and patches Megatron, once in a
process. It also works after Megatron was imported.
"""

from __future__ import annotations

import sys

from megatron_hexi.errors import set_fault_listener, user_errors
from megatron_hexi.patching import PatchSet
from megatron_hexi.platform import requested_platform, select_platform
from megatron_hexi.runtime import tell_problem

set_fault_listener(tell_problem)
with user_errors():
    #: The platform of this process.
    platform = select_platform(requested_platform(sys.argv[1:]))
    platform.install()  # before the next import, which imports Megatron

    from megatron_hexi.megatron.bridge_loop import await_bridge
    from megatron_hexi.patch_list import all_patches

    #: The installed patches.
    patches = PatchSet(all_patches(platform))
    patches.install()
    await_bridge(platform)
