"""Which files may be loaded as code: only those that no other user can write or replace."""

import os
import stat
from collections.abc import Callable
from pathlib import Path


class UntrustedError(Exception):
    """Another user could write or replace a file or folder. The message says which one and why."""


def trusted_folder(folder: Path) -> Path:
    """The folder without symbolic links, after a check of it and of all folders above it."""
    resolved = folder.resolve()
    _check(resolved, is_kind=stat.S_ISDIR)
    for parent in resolved.parents:
        _check(parent, is_kind=stat.S_ISDIR, sticky_allowed=True)
    return resolved


def trusted_file(path: Path) -> Path:
    """The path of a plain file, which is no symbolic link, after a check of it and of all folders above it."""
    resolved = trusted_folder(path.parent) / path.name
    _check(resolved, is_kind=stat.S_ISREG)
    return resolved


def _check(path: Path, *, is_kind: Callable[[int], bool], sticky_allowed: bool = False) -> None:
    status = path.lstat()
    if not is_kind(status.st_mode):
        raise UntrustedError(f"{path} is a link, or not a plain file or folder")
    if status.st_uid not in (0, os.geteuid()):
        raise UntrustedError(f"{path} belongs to another user (user id {status.st_uid})")
    # In a sticky folder such as /tmp only its owner can rename or remove a file; who owns the next one is checked.
    if sticky_allowed and status.st_mode & stat.S_ISVTX:
        return
    if status.st_mode & stat.S_IWOTH:
        raise UntrustedError(f"every user can write {path}: run `chmod o-w` on it")
    if status.st_mode & stat.S_IWGRP and not _is_private_group(status):
        raise UntrustedError(f"a group can write {path}: run `chmod g-w` on it")


def _is_private_group(status: os.stat_result) -> bool:
    """Whether the file's group has its owner as the only member, by the convention that both have one name."""
    import grp
    import pwd

    try:
        user, group = pwd.getpwuid(status.st_uid), grp.getgrgid(status.st_gid)
    except KeyError:
        return False
    return user.pw_uid != 0 and user.pw_name == group.gr_name and set(group.gr_mem) <= {user.pw_name}
