"""Ctrl-C and SIGTERM wait while parameters are written."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_NUMBERS = (signal.SIGINT, signal.SIGTERM)


class HeldBack:
    """Stands in front of Python's handlers of these signals; while it holds, they wait.

    Installed once for a run, for setting a handler is a call of the system.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}
        self._arrived: list[tuple[int, FrameType | None]] = []
        self._holds = False
        self._is_for_one_hold = False

    def install(self) -> bool:
        """Whether it was not there before. Only the main thread may set handlers, and runs them."""
        if self._handlers or threading.current_thread() is not threading.main_thread():
            return False
        for number in _NUMBERS:
            handler = signal.getsignal(number)
            if callable(handler):  # what ends the process by itself does so
                self._handlers[number] = handler
                signal.signal(number, self._handle)
        return bool(self._handlers)

    def uninstall(self) -> None:
        for number, handler in self._handlers.items():
            if signal.getsignal(number) == self._handle:  # nobody has set another meanwhile
                signal.signal(number, handler)
        self._handlers = {}

    def hold(self) -> None:
        self._holds = True
        if not self._handlers:
            self._is_for_one_hold = self.install()

    def forget(self) -> None:
        """Releases without a word about what has arrived."""
        self._holds = False
        self._arrived = []
        if self._is_for_one_hold:
            self._is_for_one_hold = False
            self.uninstall()

    def release(self) -> None:
        self._holds = False  # from here on nothing arrives
        if not (self._arrived or self._is_for_one_hold):
            return
        handlers, arrived = self._handlers, self._arrived
        self.forget()
        for number, frame in arrived:
            handlers[number](number, frame)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._holds:
            self._arrived.append((number, frame))
        else:
            # A handler that was set meanwhile may still call this one afterwards.
            self._handlers.get(number, signal.default_int_handler)(number, frame)


@contextmanager
def held_back() -> Iterator[None]:
    signals = HeldBack()
    signals.hold()
    try:
        yield
    except BaseException:
        signals.forget()
        raise
    signals.release()
