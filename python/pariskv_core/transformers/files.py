"""The files of a saved cache: who may read them is as it was before."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from typing import NamedTuple

_ACL = "system.posix_acl_access"


class Access(NamedTuple):
    """Who may read a file: what `Cache.save` of the engine keeps of a file that it replaces."""

    mode: int
    owner: int
    group: int
    acl: bytes | None

    @classmethod
    def of(cls, path: Path) -> Access:
        found = path.stat()
        acl = None
        with contextlib.suppress(OSError):  # most file systems, and most files, have none
            acl = os.getxattr(path, _ACL)
        return cls(found.st_mode & 0o777, found.st_uid, found.st_gid, acl)

    def give(self, file: int) -> None:
        """To an open file, made with mode 0600. What is refused leaves it less readable."""
        mode, made = self.mode, os.fstat(file)
        same = True
        if made.st_uid != self.owner:
            with contextlib.suppress(OSError):
                os.fchown(file, self.owner, self.group)
        try:
            if os.fstat(file).st_gid != self.group:
                os.fchown(file, -1, self.group)
            self._give_acl(file)
        except OSError:
            same = False
        if not same:
            # The old group's members are others now, and the new group's were others before.
            both = mode >> 3 & mode & 0o7
            mode = mode & 0o700 | both << 3 | both
        with contextlib.suppress(OSError):
            os.fchmod(file, mode)

    def _give_acl(self, file: int) -> None:
        if self.acl is not None:
            os.setxattr(file, _ACL, self.acl)
            return
        try:
            os.removexattr(file, _ACL)  # the default of its folder
        except OSError as error:
            if error.errno not in (errno.ENODATA, errno.ENOTSUP):
                raise


def write_new(path: Path, data: bytes, access: Access | None) -> None:
    """A file that was not there, on the disk; by the umask where there is no access to keep."""
    mode = 0o666 if access is None else 0o600
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        if access is not None:
            access.give(file.fileno())
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
