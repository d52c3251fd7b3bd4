"""Every attention backend that is installed here."""

from __future__ import annotations

import pytest

from dcprt.attention.registry import available


@pytest.fixture(params=["torch", "native"])
def backend_name(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name not in available():
        pytest.skip(f"{name} is not installed")
    return name
