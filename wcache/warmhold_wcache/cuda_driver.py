# SPDX-License-Identifier: Apache-2.0
"""The CUDA driver through ctypes: the calls that segments are made of, and errors by their names.

Owns the loaded library and no device, context or memory. Sources: cuda.h of CUDA 12.8 and 13.0.
"""

import ctypes
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_ulonglong, c_void_p
from typing import Any

from .errors import WcacheError

LIBRARY = "libcuda.so.1"


class Location(ctypes.Structure):
    """CUmemLocation: a kind of place, and which one."""

    _fields_ = (("kind", c_int), ("id", c_int))


class AllocationProperties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        *(("kind", c_int), ("handle_kinds", c_int), ("location", Location)),
        *(("windows", c_void_p), ("flags", c_ubyte * 8)),
    )


class Access(ctypes.Structure):
    """CUmemAccessDesc: who may do what."""

    _fields_ = (("location", Location), ("rights", c_int))


_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuCtxSetCurrent": (c_void_p,),
    "cuCtxSynchronize": (),
    "cuCtxGetLimit": (POINTER(c_size_t), c_int),
    "cuCtxSetLimit": (c_int, c_size_t),
    "cuMemGetAllocationGranularity": (POINTER(c_size_t), POINTER(AllocationProperties), c_int),
    "cuMemCreate": (
        *(POINTER(c_ulonglong), c_size_t, POINTER(AllocationProperties)),
        c_ulonglong,
    ),
    "cuMemRelease": (c_ulonglong,),
    "cuMemExportToShareableHandle": (c_void_p, c_ulonglong, c_int, c_ulonglong),
    "cuMemImportFromShareableHandle": (POINTER(c_ulonglong), c_void_p, c_int),
    "cuMemAddressReserve": (
        *(POINTER(c_ulonglong), c_size_t, c_size_t),
        *(c_ulonglong, c_ulonglong),
    ),
    "cuMemAddressFree": (c_ulonglong, c_size_t),
    "cuMemMap": (c_ulonglong, c_size_t, c_size_t, c_ulonglong, c_ulonglong),
    "cuMemUnmap": (c_ulonglong, c_size_t),
    "cuMemSetAccess": (c_ulonglong, c_size_t, POINTER(Access), c_size_t),
    "cuMemcpyDtoD_v2": (c_ulonglong, c_ulonglong, c_size_t),
    "cuMemcpyDtoH_v2": (c_void_p, c_ulonglong, c_size_t),
    "cuMemcpyHtoD_v2": (c_ulonglong, c_void_p, c_size_t),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
}


class CudaError(WcacheError):
    """A call that the driver refused; `result` is its CUresult."""

    def __init__(self, call: str, result: int, name: str) -> None:
        super().__init__("wcache.cuda", f"{call}: {name}", "see the driver's log (dmesg)")
        self.result = result


class Driver:
    """The library. Raise WcacheError `wcache.unsupported` where it is missing or too old."""

    def __init__(self, library: str = LIBRARY) -> None:
        try:
            self._library = ctypes.CDLL(library)
            for name, types in _SIGNATURES.items():
                function = getattr(self._library, name)
                function.argtypes, function.restype = types, c_int
        except (OSError, AttributeError) as error:
            remedy = "run it where the NVIDIA driver is"
            raise WcacheError("wcache.unsupported", f"the CUDA driver: {error}", remedy) from error

    def call(self, name: str, *arguments: object) -> None:
        """Given a function of the driver and its arguments, call it; raise CudaError where it does
        not answer with CUDA_SUCCESS."""
        result = int(getattr(self._library, name)(*arguments))
        if result:
            raise CudaError(name, result, self._read_name(result))

    def _read_name(self, result: int) -> str:
        text = c_char_p()
        self._library.cuGetErrorName(result, byref(text))
        return (text.value or b"error").decode() + f" ({result})"
