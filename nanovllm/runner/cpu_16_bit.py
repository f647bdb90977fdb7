"""Which 16-bit dtypes a CPU can compute in."""

from nanovllm.errors import ConfigError


def check_16_bit(dtype: str, *, has_bfloat16: bool) -> None:
    """Raise ConfigError if this CPU should not compute in float16 or bfloat16, whichever `dtype` is."""
    if dtype == "float16":
        raise ConfigError(
            "dtype='float16': CPU kernels add up in float16, which is too coarse for real models (SmolLM2 answers "
            "nonsense); use dtype='auto' or 'float32'"
        )
    if not has_bfloat16:
        raise ConfigError(
            "dtype='bfloat16': this CPU has no bfloat16 arithmetic and would run some hundred times slower; "
            "use dtype='auto' or 'float32'"
        )
