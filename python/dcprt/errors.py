"""Every error dcprt raises on purpose.

DcprtError
├── ConfigError            a flag or a combination of flags cannot work
│   └── GridError          tp, dcp and the model's heads do not fit each other
├── ModelError             a checkpoint is missing, damaged or not supported
├── RequestError           one request is wrong; answered with HTTP 4xx, the server goes on
├── RuntimeFailed          the processes behind the API died or are shutting down
├── CollectiveError        a collective cannot be called like this, or a peer is gone
│   └── CollectiveTimeout  a collective passed its deadline
└── PlanError              a worker saw a gap, a wrong epoch or a wrong digest
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class DcprtError(Exception):
    """Base of all errors below. Its text is written for the user who caused it."""


class ConfigError(DcprtError):
    """A flag or a combination of flags that cannot work; names the values that would."""


class GridError(ConfigError):
    """`tp`, `dcp` and the model do not fit each other."""


class ModelError(DcprtError):
    """A checkpoint is missing, damaged or not supported."""


class RequestError(DcprtError):
    """One request is wrong. `status` is the HTTP status, `param` the offending field, `code` OpenAI's."""

    def __init__(self, message: str, *, param: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.status = status
        self.code = code


class RuntimeFailed(DcprtError):
    """The processes behind the API died or are shutting down; no request can be answered."""


class CollectiveError(DcprtError):
    """A collective was called in a way that no backend can serve, or a peer is gone."""


class CollectiveTimeout(CollectiveError):
    """A collective passed its deadline; the text names operation, step and, if known, the missing ranks."""


class PlanError(DcprtError):
    """A worker saw a gap in plan numbers, a wrong epoch or a wrong digest."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` Did you mean 'x'?` for the known word nearest to `word`, or an empty string."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" Did you mean {near[0]!r}?" if near else ""
