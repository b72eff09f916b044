"""What the command line does with log records: one line each on standard error."""

from __future__ import annotations

import logging
import time

__all__ = ["LineFormatter", "set_up_logging"]


class LineFormatter(logging.Formatter):
    """Time in UTC, level, the node or run that the record names, and the message."""

    def format(self, record: logging.LogRecord) -> str:
        """Return one line; a traceback follows only if the record carries one."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        who = " ".join(
            str(getattr(record, key)) for key in ("node", "run", "step") if hasattr(record, key)
        )
        line = f"{stamp}Z {record.levelname} {f'{who} ' if who else ''}{record.getMessage()}"
        if record.exc_info:
            line += f"\n{self.formatException(record.exc_info)}"
        return line


def set_up_logging(level: str = "info") -> None:
    """Send records of `level` and above to standard error; called once, by a command."""
    handler = logging.StreamHandler()
    handler.setFormatter(LineFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
