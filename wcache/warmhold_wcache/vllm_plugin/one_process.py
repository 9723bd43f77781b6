# SPDX-License-Identifier: Apache-2.0
"""The only worker of an engine on a CPU within the core's process, as vLLM has it on a GPU.

Upstream gives a CPU's worker a process of its own, because its way of binding OpenMP's threads is
an environment that is set before a process begins. Here the thread that computes is bound before it
has started any, and those inherit it. That saves one of three processes that have imported torch
and vLLM: memory, a part of every start, and a third of a snapshot.
Sources: vllm/platforms/cpu.py (check_and_update_config), vllm/utils/ompmultiprocessing.py.
"""

import os

import torch
from vllm.utils.ompmultiprocessing import OMPProcessManager
from vllm.v1.executor.uniproc_executor import UniProcExecutor


class OneProcessExecutor(UniProcExecutor):  # type: ignore[misc]
    """For `--distributed-executor-backend`, with one worker and on a CPU."""

    def _init_executor(self) -> None:
        bind_threads(OMPProcessManager(self.vllm_config))
        super()._init_executor()


def bind_threads(manager: OMPProcessManager) -> None:
    """Given what chooses the CPUs of each rank, let the calling thread and those that it starts
    compute on the first rank's, with one thread for each; nothing where threads are not to be
    bound (VLLM_CPU_OMP_THREADS_BIND=nobind), and OMP_NUM_THREADS says how many there are."""
    if manager.skip_setup:
        return
    cpus = manager.cpu_lists[0]
    os.sched_setaffinity(0, cpus)
    torch.set_num_threads(len(cpus))
