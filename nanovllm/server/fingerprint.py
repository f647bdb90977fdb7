"""`system_fingerprint`: a short string that changes when the server may generate other tokens from the same request."""

import hashlib

from nanovllm import __version__
from nanovllm.server.engine import Engine


def system_fingerprint(engine: Engine) -> str:
    """The version, the parallel sizes above 1, and a digest of the model and the engine's options, as in vLLM."""
    config = engine.config
    sizes = (("tp", config.tensor_parallel_size), ("pp", config.pipeline_parallel_size))
    parallel = [f"{name}{size}" for name, size in sizes if size > 1]
    digest = hashlib.blake2b(repr((engine.model_name, engine.model_config, config)).encode(), digest_size=4)
    return "-".join([f"nanovllm-{__version__}", *parallel, digest.hexdigest()])
