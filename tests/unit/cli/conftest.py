"""Records to fill a case with; none of them is measured."""

from __future__ import annotations

import pytest

from kvtriage import __version__
from kvtriage.kvcache.spec import CacheSpec, LayerKind, LayerSpec
from kvtriage.records.plan import DataRef, ModelRef, Plan
from kvtriage.records.scales import ScaleRecord
from kvtriage.records.sensitivities import Sensitivities
from kvtriage.records.study import Study
from kvtriage.records.trials import ScoreTrial
from kvtriage.stages.plan import make_plan


@pytest.fixture
def spec() -> CacheSpec:
    layers = tuple(LayerSpec(i, LayerKind.FULL, 2, 1, 8, 8) for i in range(2))
    return CacheSpec("llama", layers, max_model_len=8192)


@pytest.fixture
def plan(spec: CacheSpec) -> Plan:
    model = ModelRef(source="m", path="/models/m", architecture="LlamaForCausalLM", fingerprint="f" * 64, parameters=9)
    data = DataRef(source="traffic.jsonl", sha256="d" * 64, documents=3, characters=99)
    return make_plan("m", model, spec, Study(), data, __version__)


@pytest.fixture
def scales() -> ScaleRecord:
    return ScaleRecord(
        kvtriage_version=__version__,
        per_tensor=(),
        per_head=(),
        sub_octave_k=(),
        sub_octave_v=(),
        calibration_items=("a",),
        calibration_tokens=1,
        held_out=(),
        position_edges=(0,),
        sweep=(),
        peak_bytes=0,
        warnings=(),
    )


@pytest.fixture
def sensitivities() -> Sensitivities:
    return Sensitivities(
        kvtriage_version=__version__,
        layer_probes=(),
        head_probes=(),
        type_probes=(),
        suspects=(0,),
        suspects_stand_out=False,
        explanation="",
        probe_items=("a",),
        peak_bytes=0,
    )


@pytest.fixture
def trial() -> ScoreTrial:
    return ScoreTrial(
        arm="bf16",
        task="text",
        item_id="a",
        bucket=256,
        scored_tokens=128,
        metrics={"nll": 2.0, "kl": None},
        conditions="c",
    )
