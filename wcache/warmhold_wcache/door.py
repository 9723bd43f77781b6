# SPDX-License-Identifier: Apache-2.0
"""Lets a listening socket get no new connection for a while; who tries meanwhile waits.

A filter on the socket drops what arrives, so that the other side's kernel asks again: after 1 s,
3 s, 7 s. The listener itself stays as it is, whichever event loop has it, and a snapshot takes the
filter along. Needs no right. Source: socket(7), SO_ATTACH_FILTER.
"""

import ctypes
import os
import socket
import struct

_ATTACH_FILTER, _DETACH_FILTER = 26, 27  # asm-generic/socket.h
_DROP_ALL = struct.pack("=HBBI", 0x06, 0, 0, 0)  # BPF_RET | BPF_K, 0 bytes


def shut(listener_fd: int) -> None:
    """Given a listening socket, let nobody in; raise OSError where that is not possible."""
    program = ctypes.create_string_buffer(_DROP_ALL, len(_DROP_ALL))
    request = struct.pack("HP", 1, ctypes.addressof(program))
    with socket.socket(fileno=os.dup(listener_fd)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, request)


def unlock(listener_fd: int) -> None:
    """Given a listening socket, let everybody in again; raise OSError where it was not shut."""
    with socket.socket(fileno=os.dup(listener_fd)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, _DETACH_FILTER, 0)
