# SPDX-License-Identifier: Apache-2.0
"""Tests that need an NVIDIA GPU, skipped where there is none. README.md has the commands."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from gpu_stand import Vault, environment, near, say, used_bytes, wait_for_used


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.gpu)
        if not Path("/dev/nvidiactl").exists():
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU here"))


@pytest.fixture(scope="session")
def vault() -> Iterator[Vault]:
    os.environ.update(environment())  # `verify` starts a process, which imports our packages
    made = Vault()
    yield made
    made.stop()


@pytest.fixture(autouse=True)
def timed(request: pytest.FixtureRequest) -> Iterator[None]:
    """Say what runs and how long it took, so that a run that is cut off has its results too."""
    began = time.monotonic()
    print(f"\n>>>> {request.node.name}", flush=True)
    yield
    say(f"{time.monotonic() - began:.1f} s")


@pytest.fixture
def base(vault: Vault) -> Iterator[int]:
    """Bytes in use on the GPU with an empty vault; the vault is emptied afterwards."""
    vault.drop_all()
    used = used_bytes()
    yield used
    vault.drop_all()
    wait_for_used(near(used))
