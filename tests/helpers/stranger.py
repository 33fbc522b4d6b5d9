"""A process of an arbitrary user id, as containers are run: no passwd entry, no HOME, nothing of its own to write to.

The interpreter and the sources may lie below a folder that only root may enter, so the user keeps the capability to
read every file, and with `lose_sight` gives it up once everything is imported. Where tests don't run as root, the
process keeps its user id, and the password database says that it has no entry.
"""

import ctypes
import os

UID = 54321  # of no entry in any passwd file, and owner of nothing
KEEP_CAPABILITIES, AMBIENT, RAISE = 8, 47, 2  # of prctl
READ_ALL = 2  # CAP_DAC_READ_SEARCH
VERSION_3 = 0x20080522  # of capset


def become(*folders: str) -> None:
    """Become the user in this process, which must have one thread, and own these folders. HOME is unset."""
    import pwd

    os.environ.pop("HOME", None)
    if os.geteuid() != 0:
        pwd.getpwuid = _no_entry
        return
    for folder in folders:
        os.chown(folder, UID, UID)
    libc = ctypes.CDLL(None, use_errno=True)
    _done(libc.prctl(KEEP_CAPABILITIES, 1, 0, 0, 0))
    os.setgroups([])
    os.setgid(UID)
    os.setuid(UID)
    _set_capabilities(1 << READ_ALL)
    _done(libc.prctl(AMBIENT, RAISE, READ_ALL, 0, 0))  # programs that it starts keep it too


def lose_sight() -> None:
    """Read from now on only what every user may read; what is imported stays."""
    if os.geteuid() == UID:
        _set_capabilities(0)


def _set_capabilities(bits: int) -> None:
    header = (ctypes.c_uint32 * 2)(VERSION_3, 0)  # this thread
    data = (ctypes.c_uint32 * 6)(bits, bits, bits, 0, 0, 0)  # effective, permitted, inheritable; then of 32 more
    _done(ctypes.CDLL(None, use_errno=True).capset(header, data))


def _done(status: int) -> None:
    if status:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _no_entry(uid: int) -> None:
    raise KeyError(f"getpwuid(): uid not found: {uid}")
