# SPDX-License-Identifier: Apache-2.0
"""The vLLM plug-in in the built image: the scripts of tests/contract, each in a container of its
own."""

import os

import pytest
from docker.errors import ContainerError
from stack import ROOT

from docker import DockerClient

IMAGE = os.environ.get("WARMHOLD_IMAGE", "warmhold:cpu")
pytestmark = pytest.mark.container


# weights.py, memory.py, preload.py and control.py make many real starts; their heads say how to run
# them by hand.
@pytest.mark.parametrize("script", ["pieces.py"])
def test_contract(engine: DockerClient, script: str) -> None:
    try:
        output = engine.containers.run(
            IMAGE,
            [f"/tests/contract/{script}"],
            entrypoint=["/opt/warmhold/venv/bin/python"],
            environment={
                **{"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "2"},
                "PYTHONPATH": "/tests",
            },
            volumes={str(ROOT / "tests"): {"bind": "/tests", "mode": "ro"}},
            shm_size="1g",
            remove=True,
            stderr=True,
        )
    except ContainerError as error:
        pytest.fail(f"{script}: {error.stderr.decode(errors='replace')[-6000:]}")
    print(output.decode(errors="replace"))
