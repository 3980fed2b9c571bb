"""A plan, a split and a fake engine that belong together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvtriage.engines.fake import FakeEngine, FakeTokenizer
from kvtriage.kvcache.spec import CacheSpec, LayerKind, LayerSpec
from kvtriage.records.evidence import Evidence
from kvtriage.records.plan import DataRef, ModelRef, Plan
from kvtriage.records.probes import ProbeLine
from kvtriage.records.scales import ScaleRecord
from kvtriage.records.sensitivities import Sensitivities
from kvtriage.records.study import Study
from kvtriage.records.trials import Trial
from kvtriage.stages import Reporter
from kvtriage.stages.ablate import ablate
from kvtriage.stages.calibrate import calibrate
from kvtriage.stages.diagnose import diagnose
from kvtriage.stages.plan import make_plan
from kvtriage.tasks import TASKS
from kvtriage.tasks.base import TaskItem
from kvtriage.tasks.split import Item, Split

STUDY = Study(
    buckets=(64, 128),
    items_per_bucket=3,
    score_tokens=16,
    calibration_items=2,
    calibration_tokens=64,
    holdout_items=1,
    probe_items=2,
    probe_tokens=64,
    probe_score_tokens=16,
    latency_contexts=(32, 64, 96),
    latency_repeats=2,
    decode_tokens=4,
    batch=2,
)


def hybrid(kv_heads: int = 2, window: int = 48) -> CacheSpec:
    """Six layers, every third full."""
    kinds = [LayerKind.FULL if i % 3 == 2 else LayerKind.SLIDING for i in range(6)]
    return CacheSpec(
        "test",
        tuple(
            LayerSpec(i, kind, 4, kv_heads, 8, 8, window if kind is LayerKind.SLIDING else None)
            for i, kind in enumerate(kinds)
        ),
        1024,
    )


def uniform() -> CacheSpec:
    """Six full layers of two KV heads."""
    return CacheSpec("test", tuple(LayerSpec(i, LayerKind.FULL, 4, 2, 8, 8) for i in range(6)), 1024)


def silent(_what: str, _done: int, _total: int) -> None:
    """Nobody is watching."""


def _items(role: str, count: int, tokens: int) -> tuple[Item, ...]:
    text = FakeTokenizer().encode(" ".join(f"{role}{i}" for i in range(tokens)))
    return tuple(
        Item(f"{role}-{tokens}-{i}", tuple(token + i for token in text), tokens, f"{role}{i}") for i in range(count)
    )


@dataclass
class FakeCase:
    """Runs the stages one after another."""

    spec: CacheSpec = field(default_factory=hybrid)
    study: Study = STUDY
    mantissa: Mapping[int, float] = field(default_factory=dict)
    range_: Mapping[int, float] = field(default_factory=dict)
    spread: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.engine = FakeEngine(self.spec, self.mantissa, self.range_, self.spread)
        self.split = Split(
            calibration=_items("calibration", 2, 64),
            holdout=_items("holdout", 1, 64),
            probe=_items("probe", 2, 64),
            evaluation=tuple(
                item for bucket in (64, 128) for item in _items("evaluation", self.study.items_per_bucket, bucket)
            ),
        )

    @property
    def plan(self) -> Plan:
        model = ModelRef(source="fake", path="fake", architecture="Fake", fingerprint="f" * 64, parameters=1000)
        data = DataRef(source="text", sha256="d" * 64, documents=9, characters=9000)
        return make_plan("fake", model, self.spec, self.study, data, "0")

    @property
    def items(self) -> tuple[TaskItem, ...]:
        """Texts, and continuations where the study asks for any."""
        tasks = (TASKS["text"], TASKS["generation"])
        return tuple(item for task in tasks for item in task.items(self.split, self.study, self.engine.tokenizer))

    def calibrate(self, report: Reporter = silent) -> ScaleRecord:
        return calibrate(self.plan, self.split, self.engine, report, {})

    def diagnose(
        self, done: Sequence[ProbeLine] = (), sink: Callable[[ProbeLine], None] = lambda line: None
    ) -> Sensitivities:
        return diagnose(self.plan, self.calibrate(), self.split, self.engine, done, sink, silent, {})

    def ablate(
        self,
        done: list[Trial] | None = None,
        sink: Callable[[Trial], None] | None = None,
        report: Reporter | None = None,
    ) -> tuple[Evidence, list[Trial]]:
        """The evidence, and the trials that came out of this run alone; `sink` sees those of a run that fails."""
        new: list[Trial] = []
        evidence = ablate(
            self.plan,
            self.calibrate(),
            self.diagnose(),
            self.items,
            self.split,
            self.engine,
            done or [],
            new.append if sink is None else sink,
            report or silent,
            {},
        )
        return evidence, new
