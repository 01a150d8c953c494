"""What becomes of memory that this process frees."""

from __future__ import annotations

import ctypes
from typing import Literal

__all__ = ["keep_freed_memory"]

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of glibc's mallopt(3)
_NEVER, _NONE = -1, 0


def keep_freed_memory() -> Literal["kept", "returned"]:
    """Have glibc keep freed memory, as CUDA's allocator does; "returned" where there is no glibc.

    Otherwise large tensors go back to the system, and the next step pays for their pages: half as
    long again as a backward of BERT, and more where models take turns. Setting
    MALLOC_TRIM_THRESHOLD_=-1 and MALLOC_MMAP_MAX_=0 does the same.
    """
    try:
        tune = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # no glibc
        return "returned"
    kept = tune(_M_MMAP_MAX, _NONE) and tune(_M_TRIM_THRESHOLD, _NEVER)
    return "kept" if kept else "returned"
