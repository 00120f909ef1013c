"""The one-line import: ``import megatron_hexi.adaptor``, first in a training script.

Importing this module chooses the platform (``--hexi-platform``), installs it, and puts our patches on
Megatron, exactly once a process. It also works after Megatron was imported.
"""

from __future__ import annotations

import sys

from megatron_hexi.errors import set_fault_listener, user_errors
from megatron_hexi.patching import PatchSet
from megatron_hexi.platform import requested_platform, select_platform
from megatron_hexi.runtime import tell_problem

set_fault_listener(tell_problem)
with user_errors():
    #: Where this process trains.
    platform = select_platform(requested_platform(sys.argv[1:]))
    platform.install()  # before the next import, which imports Megatron

    from megatron_hexi.patch_list import all_patches

    #: What is replaced in Megatron.
    patches = PatchSet(all_patches(platform))
    patches.install()
