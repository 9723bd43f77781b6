# SPDX-License-Identifier: Apache-2.0
"""Segments on an NVIDIA GPU: memory of the driver's virtual-memory calls, held by descriptors.

A descriptor alone keeps such memory, also with every CUDA process gone; a mapping keeps it too. So
no handle is kept here. The context is the device's primary one, which is torch's own.
"""

import os
from contextlib import ExitStack
from ctypes import byref, c_char, c_int, c_size_t, c_ulonglong, c_void_p

from .cuda_driver import Access, AllocationProperties, CudaError, Driver, Location

_DEVICE, _PINNED, _POSIX_FD = 1, 1, 1  # CUmemLocationType, CUmemAllocationType, ...HandleType
_MINIMUM = 0  # CUmemAllocationGranularity_flags
READ, READ_WRITE = 1, 3  # CUmemAccess_flags
_STACK = 0  # CUlimit
_REFUSALS = (1, 801)  # CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_SUPPORTED


class CudaSegments:
    """One device's segments in this process. Owns the mappings.

    Every call that takes memory away waits for the device first. Raise CudaError throughout, and
    WcacheError where there is no driver.
    """

    def __init__(self, ordinal: int, driver: Driver | None = None) -> None:
        self._driver = driver or Driver()
        self._call("cuInit", 0)
        device, context, granularity = c_int(), c_void_p(), c_size_t()
        self._call("cuDeviceGet", byref(device), ordinal)
        self._call("cuDevicePrimaryCtxRetain", byref(context), device.value)
        location = Location(_DEVICE, device.value)
        self._properties = AllocationProperties(_PINNED, _POSIX_FD, location)
        self._call(
            *("cuMemGetAllocationGranularity", byref(granularity)),
            *(byref(self._properties), _MINIMUM),
        )
        self._context = context
        self._location = location
        self._mapped: set[int] = set()
        self.granularity_bytes = granularity.value
        self.can_forbid_writing = True  # until the driver says otherwise

    def allocate(self, size_bytes: int) -> tuple[int, int]:
        """Given a size (a multiple of the granularity), return the descriptor of new memory and the
        address where it is mapped, writable."""
        handle, fd = c_ulonglong(), c_int(-1)
        with ExitStack() as undo:
            self._call("cuMemCreate", byref(handle), size_bytes, byref(self._properties), 0)
            with ExitStack() as release:
                release.callback(self._call, "cuMemRelease", handle)
                self._call("cuMemExportToShareableHandle", byref(fd), handle, _POSIX_FD, 0)
                undo.callback(os.close, fd.value)
                os.set_inheritable(fd.value, False)
                address = self._map(handle, size_bytes, None, READ_WRITE)
            undo.pop_all()
        return fd.value, address

    def map(self, fd: int, size_bytes: int, address: int | None = None, rights: int = READ) -> int:
        """Given a descriptor, map its memory and return the address: exactly the given one, which
        was reserved here, in the place of what is mapped there."""
        handle = c_ulonglong()
        if address is not None:
            self.unmap_keep_address(address, size_bytes)
        self._call("cuMemImportFromShareableHandle", byref(handle), fd, _POSIX_FD)
        with ExitStack() as release:
            release.callback(self._call, "cuMemRelease", handle)
            return self._map(handle, size_bytes, address, rights)

    def forbid_writing(self, address: int, size_bytes: int) -> None:
        """Make a mapping read-only, where the driver can."""
        self._wait()
        self._allow(address, size_bytes, READ)

    def unmap_keep_address(self, address: int, size_bytes: int) -> None:
        """Unmap a segment and keep its range reserved; one that is not mapped stays so."""
        if address in self._mapped:
            self._wait()
            self._call("cuMemUnmap", address, size_bytes)
            self._mapped.discard(address)

    def unmap(self, address: int, size_bytes: int) -> None:
        """Unmap a segment and give its range back."""
        self.unmap_keep_address(address, size_bytes)
        self._call("cuMemAddressFree", address, size_bytes)

    def make_private(self, address: int, size_bytes: int) -> None:
        """Put a writable copy, which nobody else has, in the place of a mapping."""
        fd, copy = self.allocate(size_bytes)
        try:
            self._wait()
            self._call("cuMemcpyDtoD_v2", copy, address, size_bytes)
            self.unmap(copy, size_bytes)
            self.map(fd, size_bytes, address, READ_WRITE)
        finally:
            os.close(fd)

    def read(self, address: int, block: memoryview) -> None:
        """Given an address in a mapping, fill a block of the host's memory from there. Any thread
        may call it."""
        self._call("cuCtxSetCurrent", self._context)
        self._call("cuMemcpyDtoH_v2", _host(block), address, len(block))

    def write(self, address: int, block: memoryview) -> None:
        """Given an address in a writable mapping, put a block of the host's memory there. Any
        thread may call it. The last bytes are on their way until the mapping is taken away."""
        self._call("cuCtxSetCurrent", self._context)
        self._call("cuMemcpyHtoD_v2", address, _host(block), len(block))

    def exchange_stack_limit(self, size_bytes: int) -> int:
        """Given the bytes of stack that each of the device's threads is to have, set that and
        return what it was; nothing may run meanwhile.

        For a kernel that needs more the driver makes it more, for all threads that the device can
        run at once, and keeps it so: 1.3 GB for 6 kB each, on an H200.
        """
        before = c_size_t()
        self._wait()
        self._call("cuCtxGetLimit", byref(before), _STACK)
        self._call("cuCtxSetLimit", _STACK, size_bytes)
        return before.value

    def _map(self, handle: c_ulonglong, size_bytes: int, address: int | None, rights: int) -> int:
        with ExitStack() as undo:
            if address is None:
                place = c_ulonglong()
                self._call("cuMemAddressReserve", byref(place), size_bytes, 0, 0, 0)
                address = place.value
                undo.callback(self._call, "cuMemAddressFree", address, size_bytes)
            self._call("cuMemMap", address, size_bytes, 0, handle, 0)
            undo.callback(self._call, "cuMemUnmap", address, size_bytes)
            self._allow(address, size_bytes, rights)
            undo.pop_all()
        self._mapped.add(address)
        return address

    def _allow(self, address: int, size_bytes: int, rights: int) -> None:
        if not self.can_forbid_writing:
            rights = READ_WRITE
        access = Access(self._location, rights)
        try:
            self._call("cuMemSetAccess", address, size_bytes, byref(access), 1)
        except CudaError as error:
            if rights != READ or error.result not in _REFUSALS:
                raise
            self.can_forbid_writing = False
            self._allow(address, size_bytes, READ_WRITE)

    def _wait(self) -> None:
        """Return when nothing runs on the device, in a thread that has the context."""
        self._call("cuCtxSetCurrent", self._context)
        self._call("cuCtxSynchronize")

    def _call(self, name: str, *arguments: object) -> None:
        self._driver.call(name, *arguments)


def _host(block: memoryview) -> object:
    """A block as the driver's calls take it."""
    return byref(c_char.from_buffer(block))
