"""One log format for all processes: time, who, what."""

from __future__ import annotations

import logging
import sys


def setup(role: str, level: str) -> logging.Logger:
    """Log to standard error as `[role] text`; returns dcprt's logger."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s [{role}] %(levelmark)s%(message)s", "%H:%M:%S"))
    handler.addFilter(_mark)
    logger = logging.getLogger("dcprt")
    logger.handlers[:] = [handler]
    logger.propagate = False
    logger.setLevel(level.upper())
    return logger


def _mark(record: logging.LogRecord) -> bool:
    """Say the level only where it is not the usual one; keep to one line whatever ids and texts of clients hold."""
    record.levelmark = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
    record.msg, record.args = "\\n".join(record.getMessage().splitlines()), None
    return True
