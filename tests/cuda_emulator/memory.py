"""Arrays with pages around them that cannot be touched."""

from __future__ import annotations

import ctypes
import math
import mmap

import numpy as np

_ALIGNMENT = 16  # all that jax_ssd promises its kernels
_libc = ctypes.CDLL(None, use_errno=True)


class Guarded:
    """An array of NaNs (bytes of ones) that ends, but for its alignment, where the next page must not be touched."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype):
        size = math.prod(shape) * dtype.itemsize
        page = mmap.PAGESIZE
        pages = math.ceil(size / page)
        self._mapping = mmap.mmap(-1, (pages + 2) * page)
        self._bytes = np.frombuffer(self._mapping, np.uint8)
        start = self._bytes.ctypes.data
        for guard in (start, start + (pages + 1) * page):
            if _libc.mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(page), 0):
                raise OSError(ctypes.get_errno(), "mprotect")
        self._inside = self._bytes[page : (pages + 1) * page]
        self._inside[...] = 0xFF
        self._first = (pages * page - size) // _ALIGNMENT * _ALIGNMENT
        self._last = self._first + size
        self.array = self._inside[self._first : self._last].view(dtype).reshape(shape)
        self.address = self.array.ctypes.data

    def intact(self) -> bool:
        """Whether nothing was written between the array and the pages around it."""
        return bool((self._inside[: self._first] == 0xFF).all() and (self._inside[self._last :] == 0xFF).all())
