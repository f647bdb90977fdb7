"""Excludes the objects of a running engine from garbage collection, which would take as long as several steps on a GPU.

A process has one collector. A second engine in the process is affected in its speed only.
"""

import gc


def freeze_objects() -> None:
    """Exclude all present objects from collections: the model and the imported modules stay alive anyway."""
    gc.freeze()


def unfreeze_objects() -> None:
    """Undo `freeze_objects`, so that a closed engine's objects can be collected."""
    gc.unfreeze()
