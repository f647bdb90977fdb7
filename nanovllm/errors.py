"""Every exception the engine raises on purpose.

NanoError
├── ConfigError (ValueError)         an option, or a combination of options, cannot be honoured
├── RequestError (ValueError)        one request is refused; the engine goes on
├── CheckpointError (ValueError)     the model's files are damaged, incomplete or not of a known kind
│   └── ModelNotFoundError           nothing was found under the model's name
└── EngineError (RuntimeError)       the engine cannot go on
    └── EngineClosedError            it was closed, by the user or by an earlier failure
"""


class NanoError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(NanoError, ValueError):
    """An option, or a combination of options, cannot be honoured."""


class RequestError(NanoError, ValueError):
    """One request is refused; the engine goes on."""


class CheckpointError(NanoError, ValueError):
    """The model's files are damaged, incomplete or not of a known kind."""


class ModelNotFoundError(CheckpointError):
    """Nothing was found under the model's name."""


class EngineError(NanoError, RuntimeError):
    """The engine cannot go on."""


class EngineClosedError(EngineError):
    """The engine was closed, by the user or by an earlier failure."""


def raised_elsewhere(kind: str, message: str, traceback: str, *, where: str) -> NanoError:
    """The error of another process, of its own class where that is one of these, with its traceback as the cause."""
    found = globals().get(kind)
    if isinstance(found, type) and issubclass(found, NanoError):
        error = found(message)
    else:
        error = EngineError(f"{kind}: {message}")
    error.__cause__ = EngineError(f"in {where}:\n{traceback}")
    return error
