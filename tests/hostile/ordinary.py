"""A process without root's rights: to root no folder is read-only."""

import ctypes
import os

CAPABILITY_VERSION_3 = 0x20080522


def drop_rights() -> None:
    """Give up every capability of this process; an ordinary user has none to give up."""
    if os.geteuid():
        return
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    none = (ctypes.c_uint32 * 6)()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.capset(header, none):
        raise OSError(ctypes.get_errno(), "capset")
