"""Forwards that write into a dict that they are given and return it, as sentence-transformers' do:
each micro-batch has a dict of its own, and the caller's is another."""

import threading
from collections import UserDict
from typing import Any


class Returned(threading.local):
    """Which argument forward has returned, in this thread. A recording that is used again
    (`static_graph`) does as the forward did that was recorded."""

    place: int | str | None = None

    def note(self, outputs: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Of one micro-batch."""
        self.place = None
        if isinstance(outputs, (dict, UserDict)):
            for place, value in (*enumerate(arguments), *keywords.items()):
                if value is outputs:
                    self.place = place

    def as_natively(self, outputs: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The caller's dict with the joined outputs in it where forward returned its own."""
        if self.place is None:
            return outputs
        given = {**dict(enumerate(args)), **kwargs}.get(self.place)
        if not isinstance(given, (dict, UserDict)):  # `shared` stands around it
            return outputs
        given.clear()
        given.update(outputs)
        return given


__all__ = ["Returned"]
