"""Logging of the package: one logger named "nanovllm".

A program that uses the package adds its own handlers. The command line (`configure_cli_logging`) and the environment
variable NANOVLLM_LOG_LEVEL make the package write to stderr.
"""

import logging
import os

from nanovllm.errors import ConfigError

ROOT = "nanovllm"
LEVEL_VARIABLE = "NANOVLLM_LOG_LEVEL"
FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def get_logger(name: str = ROOT) -> logging.Logger:
    """The logger of a module: pass `__name__`."""
    root = logging.getLogger(ROOT)
    if root.level == logging.NOTSET:
        root.setLevel(_level_from_environment(default="WARNING"))
        if LEVEL_VARIABLE in os.environ:
            _write_to_stderr(root)
    return logging.getLogger(name if name == ROOT or name.startswith(f"{ROOT}.") else f"{ROOT}.{name}")


def configure_cli_logging() -> None:
    """Write the package's log records to stderr, for the command line. Calling it again has no effect."""
    root = get_logger()
    root.setLevel(_level_from_environment(default="INFO"))
    _write_to_stderr(root)


def _write_to_stderr(root: logging.Logger) -> None:
    if not root.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(FORMAT, datefmt="%H:%M:%S"))
        root.addHandler(handler)
        root.propagate = False


def _level_from_environment(default: str) -> int:
    value = os.environ.get(LEVEL_VARIABLE, default)
    levels = logging.getLevelNamesMapping()
    if value.upper() not in levels:
        raise ConfigError(f"{LEVEL_VARIABLE}={value!r}: must be one of {', '.join(levels)}; unset it for {default}")
    return levels[value.upper()]
