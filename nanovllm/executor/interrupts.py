"""Delays Ctrl-C until the end of a block of code, such as the sending of a message."""

import signal
import threading
from types import FrameType
from typing import Any


class Uninterrupted:
    """`with Uninterrupted():` replaces the process's SIGINT handler and restores it at the end of the block.

    Outside the main thread it does nothing: there Python never raises KeyboardInterrupt.
    """

    def __enter__(self) -> None:
        self._came: tuple[int, FrameType | None] | None = None
        self._usual: Any = None
        if threading.current_thread() is threading.main_thread():
            usual = signal.getsignal(signal.SIGINT)
            if callable(usual):
                signal.signal(signal.SIGINT, self._note)
                self._usual = usual

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came = (number, frame)

    def __exit__(self, *error: object) -> None:
        if self._usual is not None:
            signal.signal(signal.SIGINT, self._usual)
            if self._came is not None:
                self._usual(*self._came)
