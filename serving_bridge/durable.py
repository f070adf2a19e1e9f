"""Files that are either the old ones or the new ones, whatever happens, and folders of one process."""

from __future__ import annotations

import fcntl
import os
import secrets
from pathlib import Path

from hlem_env.errors import ArtefactError


def lock_folder(path: Path, refusal: str) -> int:
    """Lock a folder by this file in it, until the descriptor is closed or the process ends, however it does.

    Raises:
        ArtefactError: with `refusal`: another process has the lock.
    """
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise ArtefactError(refusal) from error
    return lock


def replace_file(path: Path, data: bytes) -> None:
    """Write a file beside `path`, have it on the disk, then put it in its place."""
    # With the permissions of any new file; those of the tempfile module are the owner's alone.
    beside = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        with beside.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
