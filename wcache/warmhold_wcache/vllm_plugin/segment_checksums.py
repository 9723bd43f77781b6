# SPDX-License-Identifier: Apache-2.0
"""Prints the checksum of each GPU segment, a line each, as the publisher computed it.

    python -m warmhold_wcache.vllm_plugin.segment_checksums FD:BYTES ...

The descriptors are inherited, and the GPU is the one that the environment shows. vLLM is not used.
"""

import sys

from warmhold_wcache.vllm_plugin.cuda_memory import CudaMemory


def main() -> None:
    """Read each segment in turn, so that no more than one is mapped."""
    memory = CudaMemory(0)
    for argument in sys.argv[1:]:
        fd, size = map(int, argument.split(":"))
        address = memory.map(fd, size)
        sys.stdout.write(memory.checksum(fd, address, size) + "\n")
        memory.unmap(address, size)


if __name__ == "__main__":
    main()
