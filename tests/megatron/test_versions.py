"""Earlier versions of megatron-core: the patches fit them, and refuse any that they were not written for.

`make versions` installs the wheels, and trains with each; here they are looked at where they are there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from megatron_hexi import patching
from megatron_hexi.errors import PatchError
from megatron_hexi.patch_list import all_patches
from megatron_hexi.patching import PatchSet
from megatron_hexi.platform import select_platform
from tests.megatron.launch import REPOSITORY, environment

#: Those that `make versions` installs, each in a folder of its name.
WHEELS = REPOSITORY / "build" / "megatron-core"
#: Prints what is wrong with each patch of the megatron-core that is imported.
STATES = """
import json
from megatron_hexi.doctor.software import find_patches
print(json.dumps([[patch.target, patch.state, patch.problem] for patch in find_patches()]))
"""


def patch_states(version: str) -> list[tuple[str, str, str]]:
    path = os.pathsep.join([str(WHEELS / version), str(REPOSITORY)])
    result = subprocess.run(
        [sys.executable, "-c", STATES],
        env={**environment(), "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=250,
        check=True,
    )
    return [tuple(state) for state in json.loads(result.stdout.splitlines()[-1])]


@pytest.mark.parametrize("version", ["0.17", "0.18"])
def test_every_patch_fits(version: str) -> None:
    if not (WHEELS / version).is_dir():
        pytest.skip(f"{WHEELS / version}: no megatron-core {version}; make versions installs it")
    states = patch_states(version)
    assert [problem for _, state, problem in states if state == "does not fit"] == []
    assert sum(state == "fits" for _, state, _ in states) > 30


@pytest.mark.parametrize("version", ["0.16.1", "0.20.0"])
def test_every_patch_refuses_another_version(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patching, "_version", lambda package: version)
    every = PatchSet(all_patches(select_platform("cpu"))).patches
    wanted = [patch for patch in every if patch.package == "megatron-core"]
    assert len(wanted) > 30
    for patch in wanted:
        with pytest.raises(PatchError, match=f"written for megatron-core >=0.17,<0.20, found {version}"):
            patch.locate()
