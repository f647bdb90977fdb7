"""Parts of this package that run as child processes."""

import os
import sysconfig
from pathlib import Path


def environment() -> dict[str, str]:
    """This process's, and in it the package is found where this process found it, installed or not."""
    home = str(Path(__file__).parents[2])
    if home in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        return dict(os.environ)  # where Python looks anyway
    known = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": home if not known else os.pathsep.join([home, known])}
