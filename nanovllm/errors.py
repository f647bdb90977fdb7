"""All exceptions that the engine raises deliberately.

NanoError
├── ConfigError (ValueError)         an option, or a combination of options, is invalid or not supported
├── RequestError (ValueError)        one request is refused; the engine continues
├── CheckpointError (ValueError)     the model's files are damaged, incomplete or in an unsupported format
│   └── ModelNotFoundError           there is no model with this name
└── EngineError (RuntimeError)       the engine cannot continue
    └── EngineClosedError            the engine was closed, by the user or by an earlier failure
"""


class NanoError(Exception):
    """Base class of all errors that are raised deliberately."""


class ConfigError(NanoError, ValueError):
    """An option, or a combination of options, is invalid or not supported."""


class RequestError(NanoError, ValueError):
    """One request is refused; the engine continues."""


class CheckpointError(NanoError, ValueError):
    """The model's files are damaged, incomplete or in an unsupported format."""


class ModelNotFoundError(CheckpointError):
    """There is no model with this name."""


class EngineError(NanoError, RuntimeError):
    """The engine cannot continue."""


class EngineClosedError(EngineError):
    """The engine was closed, by the user or by an earlier failure."""
