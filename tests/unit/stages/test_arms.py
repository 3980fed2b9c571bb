"""What an engine applied is held against what an arm asked for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvtriage.engines.base import Arm
from kvtriage.engines.fake import FakeEngine
from kvtriage.errors import PolicyNotApplied
from kvtriage.kvcache.policy import CachePolicy, Scaling
from kvtriage.stages.arms import check_applied
from tests.unit.stages.fake_case import uniform

UNIT = Arm("fp8_unit", CachePolicy.fp8(6, Scaling.UNIT))


def test_an_arm_on_another_backend_is_no_arm_unless_that_is_allowed() -> None:
    spec = uniform()
    engine = FakeEngine(spec)
    info = replace(engine.info(), backend="FLASH_ATTN")
    with engine.open(UNIT) as session:
        applied = session.applied()
    check_applied(UNIT, replace(applied, backend="FLASH_ATTN"), info, spec)
    other = replace(applied, backend="TRITON_ATTN")
    with pytest.raises(PolicyNotApplied, match="runs on the attention backend TRITON_ATTN, and BF16 on FLASH_ATTN"):
        check_applied(UNIT, other, info, spec)
    check_applied(UNIT, other, replace(info, mixed_backends=True), spec)
