"""The result of a benchmark: environment, settings and rows of numbers, printed as a table or as JSON."""

import json
import platform
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm import __version__

if TYPE_CHECKING:
    from nanovllm.llm import LLM

MIB = 2**20
Row = dict[str, Any]


class FourDecimals(float):
    """A number whose differences are small: the text shows four decimals of it."""


@dataclass(frozen=True)
class Report:
    """The result of one benchmark."""

    benchmark: str
    environment: Row
    settings: Row
    results: list[Row]

    def to_json(self) -> str:
        return json.dumps(vars(self), indent=2)

    def __str__(self) -> str:
        """The settings, then a table of the results; a single result is printed one value per line."""
        head = _one_per_line({**self.environment, **self.settings})
        body = _one_per_line(self.results[0]) if len(self.results) == 1 else table(self.results)
        return f"{self.benchmark}\n\n{head}\n\n{body}"


def environment(llm: "LLM") -> Row:
    """The hardware and software that the numbers depend on."""
    import torch

    from nanovllm.engine.memory_plan import cpu_kernels
    from nanovllm.runner.device import resolve_device, resolve_dtype

    device = resolve_device(llm.config.device)
    dtype = resolve_dtype(llm.config.dtype, llm.model_config.dtype, device)
    kernels = {}
    if device.type == "cpu":
        found = cpu_kernels(llm.config, llm.model_config, device, max_model_len=llm.max_model_len)
        kernels["cpu_kernels"] = found
        dtype = dtype if found == "torch" else torch.float32
    return {
        "model": _model_name(llm.config.model),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name(),
        "dtype": str(dtype).removeprefix("torch."),
        **kernels,
        **({} if llm.config.kv_cache_dtype == "auto" else {"kv_cache_dtype": llm.config.kv_cache_dtype}),
        "threads": torch.get_num_threads(),
        "nanovllm": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def machine() -> Row:
    """The environment of a benchmark without a model."""
    return {"device": _cpu_name(), "nanovllm": __version__, "python": platform.python_version()}


def medians_of(rows: list[Row]) -> Row:
    """The median of every column of floats."""
    from statistics import median

    measured = [name for name, value in rows[0].items() if isinstance(value, float)]
    return {name: median(row[name] for row in rows) for name in measured}


def _model_name(model: str | None) -> str:
    from nanovllm.utils.default_model import DEFAULT_MODEL

    return DEFAULT_MODEL if model is None else Path(model).name


def _cpu_name() -> str:
    """The processor's name from /proc/cpuinfo; on Arm, which has none there, the architecture."""
    names = [line.split(":")[1].strip() for line in _read("/proc/cpuinfo") if line.startswith("model name")]
    return names[0] if names else platform.machine()


def peak_memory() -> Row:
    """Peak memory of this process in MiB; on a GPU also the peak that torch reserved there."""
    peak: Row = {"peak_rss_mib": _peak_rss_bytes() / MIB}
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        peak["peak_gpu_mib"] = torch.cuda.max_memory_reserved() / MIB
    return peak


def _peak_rss_bytes() -> int:
    """From /proc, which counts this program only: getrusage includes the parent's memory before exec."""
    for line in _read("/proc/self/status"):
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _read(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


# --- text -------------------------------------------------------------------------------------------------------------


def _one_per_line(row: Row) -> str:
    width = max(map(len, row))
    return "\n".join(f"{_title(name):<{width}}  {_show(value)}" for name, value in row.items())


def table(rows: list[Row]) -> str:
    """Rows as aligned columns: numbers to the right, texts to the left."""
    columns = [_column(name, [row[name] for row in rows]) for name in rows[0]]
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))


def _column(name: str, values: list[Any]) -> list[str]:
    cells = [_title(name), *map(_show, values)]
    width = max(map(len, cells))
    return [cell.ljust(width) if isinstance(values[0], str) else cell.rjust(width) for cell in cells]


def _title(name: str) -> str:
    return name.replace("_per_", "/").replace("_", " ")


def _show(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{_title(name)} {_show(part)}" for name, part in value.items())
    if isinstance(value, FourDecimals):
        return f"{value:.4f}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.2f}" if abs(value) >= 1 else f"{value:.3f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
