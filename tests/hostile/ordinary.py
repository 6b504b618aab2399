"""Drops root's capabilities, with which a process can write to read-only folders."""

import ctypes
import os

CAPABILITY_VERSION_3 = 0x20080522


def drop_rights() -> None:
    """Drop all capabilities of this process; does nothing for ordinary users."""
    if os.geteuid():
        return
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    none = (ctypes.c_uint32 * 6)()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.capset(header, none):
        raise OSError(ctypes.get_errno(), "capset")
