"""The lines that pycomm's native part logs, in a rank's own process."""

from __future__ import annotations

import logging
import time


class LogLines:
    """Collects what the logger "pycomm" gets from now on."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: self._lines.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("pycomm").addHandler(handler)

    def that_have(self, text: str, within_s: float = 0.0) -> list[str]:
        """Those with this text, as soon as there is one, or after so many seconds: they come
        through the callback pool, which need not have got a core yet."""
        give_up_s = time.monotonic() + within_s
        while True:
            said = [line for line in self._lines if text in line]
            if said or time.monotonic() > give_up_s:
                return said
            time.sleep(0.01)
