"""The few calls of the CUDA driver that torch does not offer, or not in a way that can be used.

They share device memory between processes, and ask whether a device still works. torch's allocator
can share its memory as well, but only whole segments of it, and not those that grow
(``expandable_segments``); memory of our own has neither limit. torch's events hold the interpreter
while they are asked, and may not be asked while another thread captures a graph.
"""

from __future__ import annotations

import ctypes
from typing import Protocol

from tp_runtime.errors import TpGroupError

__all__ = ["HANDLE_BYTES", "CudaDriver", "Driver"]

HANDLE_BYTES = 64
_LAZY_ENABLE_PEER_ACCESS = 1
_RELAXED = 2  # capture mode: this thread may call what could disturb a capture of another
_NOT_READY = 600


class Driver(Protocol):
    """What `PeerMemory` needs, on the device that is current in the calling thread.

    Every call raises TpGroupError with the driver's own words when it fails.
    """

    def allocate(self, nbytes: int) -> int: ...
    def fill(self, address: int, words: int, value: int) -> None: ...
    def export(self, address: int) -> bytes: ...
    def map(self, handle: bytes) -> int: ...
    def unmap(self, address: int) -> None: ...
    def write(self, address: int, data: bytes) -> None: ...
    def read(self, address: int, nbytes: int) -> bytes: ...


class _Handle(ctypes.Structure):
    _fields_ = (("data", ctypes.c_char * HANDLE_BYTES),)


class CudaDriver:
    """The real one. Raises TpGroupError where there is no driver."""

    def __init__(self) -> None:
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise TpGroupError(f"no CUDA driver can be loaded: {error}") from error

    def allocate(self, nbytes: int) -> int:
        """Bytes of the current device, aligned to 256."""
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
        return address.value

    def fill(self, address: int, words: int, value: int) -> None:
        """Sets 32-bit words; done when it returns."""
        self._call(
            "cuMemsetD32_v2",
            ctypes.c_uint64(address),
            ctypes.c_uint32(value & 0xFFFFFFFF),
            ctypes.c_size_t(words),
        )
        self._call("cuCtxSynchronize")

    def export(self, address: int) -> bytes:
        """A name under which another process can map an allocation."""
        handle = _Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
        return bytes(bytearray(handle))

    def map(self, handle: bytes) -> int:
        """The address here of another process's allocation; enables access to its device."""
        address = ctypes.c_uint64()
        self._call(
            "cuIpcOpenMemHandle_v2",
            ctypes.byref(address),
            _Handle.from_buffer_copy(handle),
            ctypes.c_uint(_LAZY_ENABLE_PEER_ACCESS),
        )
        return address.value

    def unmap(self, address: int) -> None:
        """Ends a mapping; the work that uses it must be done."""
        self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def write(self, address: int, data: bytes) -> None:
        """Copies to the device; done when it returns."""
        self._call("cuMemcpyHtoD_v2", ctypes.c_uint64(address), data, ctypes.c_size_t(len(data)))
        self._call("cuCtxSynchronize")

    def read(self, address: int, nbytes: int) -> bytes:
        """Copies from the device."""
        data = ctypes.create_string_buffer(nbytes)
        self._call("cuMemcpyDtoH_v2", data, ctypes.c_uint64(address), ctypes.c_size_t(nbytes))
        return data.raw

    def context(self) -> int:
        """The context that is current in the calling thread."""
        context = ctypes.c_void_p()
        self._call("cuCtxGetCurrent", ctypes.byref(context))
        return context.value or 0

    def fault(self, context: int, event: int) -> str | None:
        """Why the work of a context has ended for good; None while it goes on.

        Args:
            context: becomes the current one of the calling thread, as no other may be made for it.
            event: of this context.
        """
        mode = ctypes.c_int(_RELAXED)
        self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        try:
            self._call("cuCtxSetCurrent", ctypes.c_void_p(context))
            code: int = self._cuda.cuEventQuery(ctypes.c_void_p(event))
        finally:
            self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
        return None if code in (0, _NOT_READY) else f"CUDA error {code}: {self._text(code)}"

    def _text(self, code: int) -> str:
        text = ctypes.c_char_p()
        self._cuda.cuGetErrorString(code, ctypes.byref(text))
        return (text.value or b"no text").decode(errors="replace")

    def _call(self, name: str, *args: object) -> None:
        code = getattr(self._cuda, name)(*args)
        if code:
            raise TpGroupError(f"{name} failed: {self._text(code)} (error {code})")
