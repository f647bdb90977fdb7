"""The reading path: the files of an offline generation on a CPU, listed in docs/architecture.md, and no others."""

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOCUMENT = ROOT / "docs" / "architecture.md"
ROW = re.compile(r"^\| `(\S+\.py)` \| ([\d,]+) \|", re.MULTILINE)
MAX_LINES = 5_500
LENGTH_TOLERANCE = 30  # lines that a file may have grown or shrunk since the list was written
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
}
SCRIPT = """
import sys
from nanovllm import LLM, SamplingParams
options = dict(load_format="dummy", device="cpu", skip_tokenizer_init=True, num_kv_cache_blocks=8, max_model_len=64)
options["cpu_kernels"] = "torch"
with LLM(sys.argv[1], **options) as llm:
    llm.generate([[1, 2, 3], [4]], SamplingParams(max_tokens=4), use_tqdm=False)
print(*(m.__file__ for n, m in sys.modules.items() if n.split(".")[0] == "nanovllm" and m.__file__), sep="\\n")
"""


def listed() -> dict[str, int]:
    """Files and their lengths, as the document has them."""
    return {file: int(length.replace(",", "")) for file, length in ROW.findall(DOCUMENT.read_text())}


def length(file: str) -> int:
    return (ROOT / "nanovllm" / file).read_text().count("\n")


def test_no_other_module_is_imported(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    printed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=120).stdout
    loaded = {str(Path(file).relative_to(ROOT / "nanovllm")) for file in printed.split()}
    loaded = {file for file in loaded if length(file)}  # an empty __init__.py is nothing to read
    assert loaded == set(listed()), "docs/architecture.md must list what an offline generation on a CPU imports"


def test_the_list_is_short() -> None:
    assert sum(map(length, listed())) <= MAX_LINES


def test_the_lengths_are_those_of_the_files() -> None:
    wrong = {file: length(file) for file, stated in listed().items() if abs(length(file) - stated) > LENGTH_TOLERANCE}
    assert not wrong, "lengths to correct in docs/architecture.md"
