"""No library is loaded that another user could have written, replaced or linked to."""

import grp
import os
import pwd
from pathlib import Path
from types import SimpleNamespace

import pytest

from nanovllm.native import trust
from nanovllm.native.build import find_library, prebuilt_name
from nanovllm.native.trust import UntrustedError, trusted_file, trusted_folder
from tests.native.conftest import LEVEL, cached_library, compile_library

# --- the check itself -------------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "outer" / "inner" / "library.so"
    path.parent.mkdir(parents=True)
    path.touch(mode=0o600)
    return path


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make another user the owner. Without the right to do so, become another user."""
    if os.geteuid() == 0:
        os.chown(path, 12345, -1)
    else:
        user = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)


def test_own_files_are_trusted(file: Path) -> None:
    assert trusted_file(file) == file.resolve()


@pytest.mark.parametrize("level", [0, 1, 2], ids=["file", "folder", "folder above"])
@pytest.mark.parametrize("mode", [0o720, 0o702], ids=["group", "all"])
def test_what_others_can_write_is_not(level: int, mode: int, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust, "_is_private_group", lambda status: False)
    path = [file, *file.parents][level]
    path.chmod(mode)
    with pytest.raises(UntrustedError, match=f"can write {path.resolve()}: run `chmod"):
        trusted_file(file)


@pytest.mark.parametrize("level", [0, 1, 2], ids=["file", "folder", "folder above"])
def test_what_belongs_to_others_is_not(level: int, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    give_away([file, *file.parents][level], monkeypatch)
    with pytest.raises(UntrustedError, match="belongs to another user"):
        trusted_file(file)


def test_sticky_bit_protects_folders_above_only(file: Path) -> None:
    file.parent.parent.chmod(0o1777)
    trusted_file(file)
    file.parent.chmod(0o1777)
    with pytest.raises(UntrustedError, match="every user can write"):
        trusted_file(file)


def test_link_to_a_file_is_not_trusted(file: Path) -> None:
    link = file.with_name("link.so")
    link.symlink_to(file)
    with pytest.raises(UntrustedError, match="is a link"):
        trusted_file(link)


def test_link_to_a_folder_is_followed_and_its_target_checked(file: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(file.parent)
    assert trusted_folder(link) == file.parent.resolve()
    file.parent.chmod(0o777)
    with pytest.raises(UntrustedError, match=f"can write {file.parent.resolve()}"):
        trusted_folder(link)


@pytest.mark.parametrize(
    ("user", "group", "members", "private"),
    [
        ("ada", "ada", [], True),
        ("ada", "ada", ["ada"], True),
        ("ada", "ada", ["ada", "eve"], False),
        ("ada", "staff", [], False),
        ("root", "root", [], False),
    ],
)
def test_private_group(
    user: str, group: str, members: list[str], private: bool, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = SimpleNamespace(pw_name=user, pw_uid=0 if user == "root" else 1000)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: found)
    monkeypatch.setattr(grp, "getgrgid", lambda gid: SimpleNamespace(gr_name=group, gr_mem=members))
    file.chmod(0o660)
    if private:
        trusted_file(file)
    else:
        with pytest.raises(UntrustedError, match="a group can write"):
            trusted_file(file)


# --- libraries that others may have planted ---------------------------------------------------------------------------


def plant(path: Path, mark: Path) -> None:
    """Write a library that creates the file `mark` when it is loaded."""
    code = f'#include <stdio.h>\n__attribute__((constructor)) void f(void) {{ fclose(fopen("{mark}", "w")); }}'
    path.unlink(missing_ok=True)
    compile_library(code, path).chmod(0o700)


def test_planted_libraries_do_leave_a_mark(
    folders: dict[str, Path], log: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    plant(cached_library(folders), tmp_path / "mark")
    assert find_library(LEVEL, **folders) and (tmp_path / "mark").exists()


@pytest.mark.parametrize("opened", ["library", "cache", "folder above"])
def test_planted_in_the_cache(
    opened: str, folders: dict[str, Path], log: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    library, mark = cached_library(folders), tmp_path / "mark"
    cache = library.parent
    plant(library, mark)
    {"library": library, "cache": cache, "folder above": cache.parent}[opened].chmod(0o777)
    found = find_library(LEVEL, **folders)
    assert found and found.answer() == 42 and not mark.exists()
    refused, compiling = log.messages
    assert "every user can write" in refused and "compiling" in compiling
    if opened == "library":  # only this user can have opened it: it was replaced
        assert trusted_file(library)


def test_planted_link_in_the_cache(folders: dict[str, Path], log: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    library, mark = cached_library(folders), tmp_path / "mark"
    plant(tmp_path / "elsewhere" / "x.so", mark)
    library.symlink_to(tmp_path / "elsewhere" / "x.so")
    found = find_library(LEVEL, **folders)
    assert found and found.answer() == 42 and not mark.exists()
    assert not library.is_symlink() and (tmp_path / "elsewhere" / "x.so").exists()


def test_planted_as_prebuilt(folders: dict[str, Path], log: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    plant(folders["prebuilt"] / prebuilt_name(LEVEL, folders["sources"]), tmp_path / "mark")
    folders["prebuilt"].chmod(0o777)
    found = find_library(LEVEL, **folders)
    assert found and found.answer() == 42 and not (tmp_path / "mark").exists()
    assert log.messages[0].startswith("the prebuilt native library is not used: every user can write")


def test_none_where_the_temporary_folder_is_not_safe_either(
    folders: dict[str, Path], log: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    for folder in (temporary, tmp_path / "cache"):
        folder.mkdir(exist_ok=True)
        folder.chmod(0o777)
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    monkeypatch.setattr("importlib.metadata.distributions", lambda name: [])
    assert find_library(LEVEL, **folders) is None
    assert "no native library" in log.messages[-1] and f"can write {temporary}" in log.messages[-1]
    assert not list(temporary.iterdir())
