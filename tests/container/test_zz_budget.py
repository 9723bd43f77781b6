# SPDX-License-Identifier: Apache-2.0
"""Cost is part of the design: how many real engine starts the container tests made. Runs last."""

import pytest
from box import REAL_STARTS, RealStack

pytestmark = pytest.mark.container
MAX_REAL_STARTS = 16


def test_real_engine_starts_stay_within_the_budget(
    real: RealStack, guarded: RealStack, eager: RealStack, request: pytest.FixtureRequest
) -> None:
    counts = [stack.log().count("engine starting") for stack in (real, guarded, eager)]
    print(f"real engine starts so far: {counts}")
    full = "not full" not in str(request.config.getoption("-m"))
    assert 0 < sum(counts) <= (40 if full else MAX_REAL_STARTS)
    assert REAL_STARTS == {}  # all stacks are still up, so nothing is counted twice
