# SPDX-License-Identifier: Apache-2.0
"""A stack per test, ended afterwards whatever happened."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from stack import Stack, can_unshare


@pytest.fixture
def make_stack(tmp_path: Path) -> Iterator[Callable[..., Stack]]:
    if not can_unshare():
        pytest.fail("these tests need root and unshare, for a PID namespace of their own")
    made: list[Stack] = []

    def make(**environment: str) -> Stack:
        folder = tmp_path / f"stack{len(made)}"
        folder.mkdir()
        made.append(Stack(folder, **environment))
        return made[-1]

    yield make
    for stack in made:
        stack.close()
        for name in stack.shm_files():  # a stack that was killed could not remove its own
            Path("/dev/shm", name).unlink()
