"""How hard hypothesis tries in the unit tests: `DCPRT_HYPOTHESIS_FACTOR=20` for a long search."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

FACTOR = int(os.environ.get("DCPRT_HYPOTHESIS_FACTOR", "1"))


def search(examples: int, steps: int = 50) -> settings:
    """Settings for a test that tries `examples` inputs, or histories of up to `steps` rules."""
    return settings(
        max_examples=examples * FACTOR,
        stateful_step_count=steps,
        deadline=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
