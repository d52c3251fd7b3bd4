"""The instruction sets that a kernel test runs on."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest


def _isas() -> tuple[str, ...]:
    if find_spec("dcprt_kernel") is None:
        return ()
    from dcprt_kernel.linear import possible_isas

    return possible_isas()


@pytest.fixture(params=_isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each one that this processor has, in turn. A module for all of whose tests it is meant says so by a mark."""
    from dcprt_kernel.linear import forced_isa

    with forced_isa(request.param):
        yield request.param
