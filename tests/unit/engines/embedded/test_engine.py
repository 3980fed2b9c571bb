"""The embedded engine on tiny random models: the worksheet's bytes, chunking, numerics, refusals."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from kvtriage.engines.base import Arm, ScoreRequest, ScoreResponse
from kvtriage.engines.embedded.attention import AttentionCall
from kvtriage.engines.embedded.engine import EmbeddedEngine, open_engine
from kvtriage.engines.embedded.kernel.kernel import DecodeKernel, NoKernel
from kvtriage.engines.embedded.storing import StoringAttention, layer_storages
from kvtriage.errors import EngineError, ModelError, NonFinite, PolicyNotApplied, StudyError
from kvtriage.fp8 import e4m3
from kvtriage.fp8.e4m3 import MAX
from kvtriage.fp8.scales import ScaleSet, fit_scales, fit_sub_octaves
from kvtriage.fp8.stats import KVStats
from kvtriage.kvcache.policy import CachePolicy, Fp8, Mantissa, Scaling
from kvtriage.kvcache.price import price_policy
from kvtriage.kvcache.spec import CacheSpec, LayerKind
from tests.unit.engines import tiny

FAMILIES = {"llama": tiny.llama, "gemma3": tiny.gemma3, "gemma2": tiny.gemma2, "gpt_oss": tiny.gpt_oss}
EDGES = (0, 8, 24)


@dataclasses.dataclass(frozen=True)
class Bench:
    """An engine, and what a calibration on it gives."""

    engine: EmbeddedEngine
    folder: Path
    stats: KVStats
    scales: dict[Scaling, ScaleSet]

    @property
    def spec(self) -> CacheSpec:
        return self.engine.spec

    def policies(self) -> dict[str, CachePolicy]:
        count = self.spec.num_layers
        found = {str(scaling): CachePolicy.fp8(count, scaling) for scaling in Scaling}
        found |= {f"{scaling}+skip": CachePolicy.fp8(count, scaling, [0]) for scaling in Scaling}
        return found | {
            "native": CachePolicy.native(count),
            "skip all": CachePolicy.fp8(count, Scaling.UNIT, range(count)),
        }

    def arm(self, policy: CachePolicy, **changes: Any) -> Arm:
        scaling = policy.scaling
        scales = self.scales.get(scaling) if scaling is not None else None
        return Arm("test", policy, scales, fit_sub_octaves(self.stats, self.spec), **changes)

    def score(self, policy: CachePolicy, length: int = 48, **changes: Any) -> ScoreResponse:
        with self.engine.open(self.arm(policy, **changes)) as session:
            return session.score(ScoreRequest("x", tiny.prompt(length), length // 2))


def quiet(_done: int, _total: int) -> None:
    """Nobody is watching."""


@pytest.fixture(scope="module", params=FAMILIES)
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp(request.param)
    spec = tiny.save(FAMILIES[request.param](), folder)
    with open_engine(folder, spec, numerics="storage", device="cpu", threads=1) as engine:
        stats = engine.observe([tiny.prompt(40, seed=seed) for seed in (2, 3)], EDGES, quiet)
        scales = {scaling: fit_scales(stats, spec, scaling) for scaling in (Scaling.PER_TENSOR, Scaling.PER_HEAD)}
        yield Bench(engine, folder, stats, scales)


def mean_kl(response: ScoreResponse, reference: ScoreResponse) -> float:
    kl = response.distribution.kl_from(reference.distribution)
    return sum(kl) / len(kl)


@pytest.mark.parametrize("context", [3, tiny.WINDOW, tiny.WINDOW + 1, 50])
@pytest.mark.parametrize("batch", [1, 3])
def test_held_bytes_are_the_worksheets_for_every_policy(bench: Bench, context: int, batch: int) -> None:
    for name, policy in bench.policies().items():
        with bench.engine.open(bench.arm(policy)) as session:
            prompts = [tiny.prompt(context, seed=seed) for seed in range(batch)]
            generation = session.generate(prompts, 4)
        held = context + 3
        assert generation.held_tokens == (held,) * batch
        worksheet = price_policy(bench.spec, policy, [held] * batch)
        assert generation.held_bytes == worksheet.policy_bytes, name
        assert len(generation.token_s) == 3
        assert [len(row) for row in generation.token_ids] == [4] * batch


@pytest.mark.parametrize("by_torch", [False, True])
def test_prompts_of_any_lengths_go_on_as_each_would_alone(bench: Bench, by_torch: bool) -> None:
    """Windows that are full and not, twice the same length, and the longest neither first nor last."""
    engine = bench.engine
    if by_torch:
        engine = EmbeddedEngine(
            engine._model, engine.tokenizer, torch.bfloat16, "attention", threads=1, decode=NoKernel("test")
        )
    lengths = [9, tiny.WINDOW, 41, 3, 9, tiny.WINDOW - 2]
    prompts = [tiny.prompt(length, seed=seed) for seed, length in enumerate(lengths)]
    for name, policy in bench.policies().items():
        with engine.open(bench.arm(policy)) as session:
            together = session.generate(prompts, 7)
            alone = [session.generate([prompt], 7) for prompt in prompts]
        assert together.token_ids == tuple(row for one in alone for row in one.token_ids), name
        assert together.held_tokens == tuple(length + 6 for length in lengths)
        assert together.held_bytes == sum(one.held_bytes or 0 for one in alone)
        assert together.held_bytes == price_policy(bench.spec, policy, together.held_tokens).policy_bytes, name
        assert len(together.token_s) == 6


def test_native_is_transformers_own_answer(bench: Bench) -> None:
    """With a float32 cache our attention has nothing left to differ by but summation order."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        bench.folder, dtype=torch.float32, attn_implementation="eager"
    )
    tokens = tiny.prompt(48)
    with torch.inference_mode():
        logits = model(torch.tensor([tokens])).logits[0]
        expected = -torch.log_softmax(logits[23:47], -1).gather(1, torch.tensor(tokens[24:])[:, None])[:, 0]
    exact = EmbeddedEngine(
        bench.engine._model, bench.engine.tokenizer, torch.float32, "storage", threads=1, decode=bench.engine._decode
    )
    with exact.open(Arm("float32", CachePolicy.native(bench.spec.num_layers))) as session:
        response = session.score(ScoreRequest("x", tokens, 24))
    np.testing.assert_allclose(response.nll, expected.numpy(), atol=2e-4)


@pytest.mark.parametrize("chunk", [1, 7, tiny.WINDOW, 23])
def test_prefill_in_chunks_and_decode_agree_with_prefill(bench: Bench, chunk: int) -> None:
    """Chunks sum in another order (1e-6 of a value), and what that moves across a rounding tie moves one step.

    So the native cache agrees to 1e-4 nats of KL, and FP8 to a fifth of what FP8 costs at all.
    """
    count = bench.spec.num_layers
    native = bench.score(CachePolicy.native(count))
    for name, policy in bench.policies().items():
        whole, pieces = bench.score(policy), bench.score(policy, prefill_chunk=chunk)
        tolerance = 1e-4 if policy.is_native else max(1e-4, 0.2 * mean_kl(whole, native))
        assert mean_kl(pieces, whole) < tolerance, name


def test_greedy_decoding_repeats_what_scoring_predicts(bench: Bench) -> None:
    policy = CachePolicy.native(bench.spec.num_layers)
    prompt = tiny.prompt(30)
    with bench.engine.open(bench.arm(policy)) as session:
        chosen = session.generate([prompt], 6).token_ids[0]
        response = session.score(ScoreRequest("x", (*prompt, *chosen), len(prompt)))
    assert response.top1 == chosen


def test_decode_by_the_kernel_is_decode_by_torch(bench: Bench) -> None:
    """Layer by layer, on the same stored bytes: what is chosen and held is the same."""
    by_torch = EmbeddedEngine(
        bench.engine._model, bench.engine.tokenizer, torch.bfloat16, "storage", threads=1, decode=NoKernel("a test")
    )
    prompts = [tiny.prompt(30, seed=seed) for seed in range(2)]
    for name, policy in bench.policies().items():
        found = []
        for engine in (bench.engine, by_torch):
            storages = engine._storages(bench.arm(policy))
            tap = Tap(StoringAttention(storages, 40, engine._decode), bench.spec.num_layers - 1)
            engine._model.forward_hidden(engine._model.tokens(prompts), tap)
            for step in range(8):
                token = engine._model.tokens([[5 + step], [11 + step]])
                engine._model.forward_hidden(token, tap, start=30 + step)
            found.append(torch.cat([output for _, output in tap.seen], dim=2))
        torch.testing.assert_close(*found, rtol=0, atol=2e-2 * float(found[1].abs().max()), msg=name)
        assert (found[0] - found[1]).abs().mean() < 1e-3 * found[1].abs().mean(), name


def test_the_engine_says_what_decodes(bench: Bench, tmp_path: Path) -> None:
    assert isinstance(bench.engine._decode, DecodeKernel)
    decode = bench.engine._decode.name
    assert bench.engine.info().backend == f"kvtriage, products by {bench.engine._model.products}, decode by {decode}"
    spec = tiny.save(tiny.llama(), tmp_path)
    with open_engine(tmp_path, spec, numerics="attention", device="cpu", threads=1) as engine:
        assert "decode by torch (the numerics 'attention'" in engine.info().backend


def test_what_was_applied_is_read_back(bench: Bench) -> None:
    count = bench.spec.num_layers
    with bench.engine.open(bench.arm(CachePolicy.fp8(count, Scaling.PER_HEAD, [0]))) as session:
        applied = session.applied()
    assert applied.dtypes == ("bfloat16", *("float8_e4m3fn",) * (count - 1))
    assert applied.k_scales[0] == ()
    for index in range(1, count):
        assert applied.k_scales[index] == bench.scales[Scaling.PER_HEAD].layers[index].k
        assert applied.v_scales[index] == bench.scales[Scaling.PER_HEAD].layers[index].v


def test_every_format_drifts_and_native_does_not(bench: Bench) -> None:
    count = bench.spec.num_layers
    reference = bench.score(CachePolicy.native(count))
    assert mean_kl(bench.score(CachePolicy.native(count)), reference) == 0
    for policy in (*bench.policies().values(), CachePolicy.uniform(count, Mantissa())):
        if not policy.is_native:
            assert mean_kl(bench.score(policy), reference) > 0


def test_probes_equal_the_long_way_round(bench: Bench) -> None:
    """Resuming from recorded layer outputs gives what a whole pass gives."""
    count = bench.spec.num_layers
    formats = (Fp8(Scaling.UNIT), Fp8(Scaling.PER_HEAD), Mantissa(), Fp8(Scaling.UNIT, (0,)))
    policies = [CachePolicy.only(count, [index], fmt) for index in range(count) for fmt in formats]
    arms = [dataclasses.replace(bench.arm(policy), scales=bench.scales[Scaling.PER_HEAD]) for policy in policies]
    request = ScoreRequest("x", tiny.prompt(48), 24)
    found = bench.engine.probe([request], arms, quiet)
    with bench.engine.open(arms[0]) as session:
        assert session.score(request).nll  # the model is whole again afterwards
    reference = bench.score(CachePolicy.native(count))
    for arm, (kl,) in zip(arms, found, strict=True):
        with bench.engine.open(arm) as session:
            assert kl == pytest.approx(mean_kl(session.score(request), reference), rel=1e-6, abs=1e-12)


def test_observed_ranges_are_those_of_the_real_keys_and_values(bench: Bench) -> None:
    """Against hooks on k_proj and v_proj where no norm and no rotation stands between."""
    seen: dict[int, float] = {}
    layers: Any = bench.engine._model.decoder_layers
    hooks = [
        layer.self_attn.v_proj.register_forward_hook(
            lambda _m, _a, out, index=index: seen.__setitem__(index, max(seen.get(index, 0.0), float(out.abs().max())))
        )
        for index, layer in enumerate(layers)
    ]
    try:
        bench.engine.observe([tiny.prompt(40, seed=2)], EDGES, quiet)
        bench.engine.observe([tiny.prompt(40, seed=3)], EDGES, quiet)
    finally:
        for hook in hooks:
            hook.remove()
    for index in range(bench.spec.num_layers):
        assert bench.stats.tensors[index, "v"].amax.max() == pytest.approx(seen[index], rel=1e-6)


def test_statistics_are_of_every_head(bench: Bench) -> None:
    for (index, tensor), found in bench.stats.tensors.items():
        layer = bench.spec.layers[index]
        heads = layer.num_attention_heads if tensor == "q" else layer.num_kv_heads
        assert found.num_heads == heads
        np.testing.assert_array_equal(found.amax_by_position.max(axis=1), found.amax)


def test_statistics_do_not_depend_on_how_the_text_is_cut(bench: Bench) -> None:
    later, sooner = (bench.engine.observe([tiny.prompt(40, seed=seed)], EDGES, quiet).tensors for seed in (3, 2))
    for key in bench.stats.tensors:
        found = later[key].merge(sooner[key])
        np.testing.assert_array_equal(found.amax, bench.stats.tensors[key].amax)
        np.testing.assert_allclose(found.mantissa_sse, bench.stats.tensors[key].mantissa_sse, rtol=1e-6)


def test_held_out_shares_are_counted(bench: Bench) -> None:
    """On the calibration text itself per-head scales saturate nothing; far smaller ones nearly everything."""
    prompts = [tiny.prompt(40, seed=s) for s in (2, 3)]
    (own,) = bench.engine.check_scales(prompts, [bench.scales[Scaling.PER_HEAD]], quiet)
    assert {share.saturated for share in own.shares} == {0.0}
    assert len(own.shares) == 2 * sum(layer.num_kv_heads for layer in bench.spec.layers)
    small = ScaleSet(
        Scaling.PER_HEAD,
        tuple(
            dataclasses.replace(layer, k=tuple(v / 1e4 for v in layer.k), v=tuple(v / 1e4 for v in layer.v))
            for layer in bench.scales[Scaling.PER_HEAD].layers
        ),
    )
    (found,) = bench.engine.check_scales([tiny.prompt(40)], [small], quiet)
    assert all(share.saturated > 0.9 for share in found.shares)


@dataclasses.dataclass
class Tap:
    """Records what one layer was given and gave, around the attention that does it."""

    inner: StoringAttention
    layer_idx: int
    seen: list[tuple[AttentionCall, torch.Tensor]] = dataclasses.field(default_factory=list)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        output = self.inner.attend(call)
        if call.layer_idx == self.layer_idx:
            self.seen.append((call, output))
        return output


@pytest.mark.parametrize("scaling", list(Scaling))
def test_attention_numerics_are_those_written_down(bench: Bench, scaling: Scaling) -> None:
    """Q, K, V and P through E4M3 in numpy, by the definition: q_scale is its group's largest, P has 2^8 on top."""
    index, spec = bench.spec.num_layers - 1, bench.spec
    layer = spec.layers[index]
    arm = bench.arm(CachePolicy.fp8(spec.num_layers, scaling))
    storages = layer_storages(arm, spec, torch.bfloat16, "attention", torch.device("cpu"))
    tap = Tap(StoringAttention(storages, 20, NoKernel("test")), index)
    bench.engine._model.forward_hidden(torch.tensor([tiny.prompt(20)]), tap)
    ((call, output),) = tap.seen
    own = bench.scales[scaling].layers[index] if scaling is not Scaling.UNIT else None
    group = layer.queries_per_kv_head

    def stored(values: torch.Tensor, scales: tuple[float, ...] | None) -> np.ndarray[Any, Any]:
        scale = np.array(scales or (1.0,), np.float32)[:, None, None]
        return np.asarray(e4m3.decode(e4m3.encode(values[0].numpy() / scale)) * scale)

    q_scale = (
        None
        if own is None
        else own.q
        if len(own.q) == 1
        else tuple(max(own.q[h - h % group : h - h % group + group]) for h in range(layer.num_attention_heads))
    )
    q = stored(call.query, q_scale)
    k, v = stored(call.key, own.k if own else None), stored(call.value, own.v if own else None)
    for h in range(layer.num_attention_heads):
        scores = q[h] @ k[h // group].T * call.scaling
        if call.softcap is not None:
            scores = call.softcap * np.tanh(scores / call.softcap)
        scores[np.triu_indices(20, 1)] = -np.inf
        sink = -np.inf if call.sinks is None else float(call.sinks[h])
        top = np.maximum(scores.max(axis=1, keepdims=True), sink)
        p = np.exp(scores - top)
        total = p.sum(axis=1, keepdims=True) + np.exp(sink - top)
        want = e4m3.decode(e4m3.encode(p * 256)) / 256 @ v[h // group] / total
        assert np.abs(output[0, h].numpy() - want).mean() < 1e-3 * np.abs(want).mean() + 1e-6


@pytest.mark.parametrize("numerics", ["storage", "attention"])
def test_the_bound_and_the_probes_share_the_numerics_of_fp8(tmp_path: Path, numerics: str) -> None:
    """On a healthy model scales win nothing: the bound drifts about as far as FP8 does, Q and P included."""
    spec = tiny.save(tiny.llama(), tmp_path)
    with open_engine(tmp_path, spec, numerics=numerics, device="cpu", threads=1) as engine:
        stats = engine.observe([tiny.prompt(200, seed=2)], (0,), quiet)
        bench = Bench(
            engine, tmp_path, stats, {s: fit_scales(stats, spec, s) for s in Scaling if s is not Scaling.UNIT}
        )
        assert engine.info().numerics == numerics
        reference = bench.score(CachePolicy.native(3), 200)
        fp8 = mean_kl(bench.score(CachePolicy.fp8(3, Scaling.PER_HEAD), 200), reference)
        bound = mean_kl(bench.score(CachePolicy.uniform(3, Mantissa()), 200), reference)
        assert bound == pytest.approx(fp8, rel=0.5)
        every_head = CachePolicy.uniform(3, Fp8(Scaling.PER_HEAD, (0, 1)))
        assert mean_kl(bench.score(every_head, 200), reference) == pytest.approx(fp8, rel=1e-6)


def test_numerics_leave_native_layers_alone_and_cost_more_elsewhere(tmp_path: Path) -> None:
    spec = tiny.save(tiny.llama(), tmp_path)
    responses = {}
    for numerics in ("storage", "attention"):
        with open_engine(tmp_path, spec, numerics=numerics, device="cpu", threads=1) as engine:
            for name, policy in (("native", CachePolicy.native(3)), ("fp8", CachePolicy.fp8(3, Scaling.UNIT))):
                with engine.open(Arm(name, policy)) as session:
                    responses[numerics, name] = session.score(ScoreRequest("x", tiny.prompt(200), 100))
                    assert [len(q) for q in session.applied().q_scales] == [
                        6 if (numerics, name) == ("attention", "fp8") else 0
                    ] * 3
    assert responses["storage", "native"].nll == responses["attention", "native"].nll
    drift = {n: mean_kl(responses[n, "fp8"], responses[n, "native"]) for n in ("storage", "attention")}
    assert drift["attention"] > 1.1 * drift["storage"]


@pytest.mark.parametrize(("projection", "name"), [("k_proj", "K"), ("v_proj", "V")])
@pytest.mark.parametrize("policy", [CachePolicy.native(3), CachePolicy.fp8(3, Scaling.UNIT)])
def test_a_layer_that_overflows_is_named(tmp_path: Path, projection: str, name: str, policy: CachePolicy) -> None:
    """Whole, in chunks, while generating, and while observing: saturation must not hide it."""
    spec = tiny.save(tiny.llama(), tmp_path)
    with open_engine(tmp_path, spec, numerics="storage", device="cpu", threads=1) as engine:
        layers: Any = engine._model.decoder_layers
        getattr(layers[1].self_attn, projection).weight[0, 0] = float("inf")
        said = pytest.raises(NonFinite, match=f"{name} of layer 1")
        for chunk in (None, 7):
            with engine.open(Arm("x", policy, prefill_chunk=chunk)) as session, said:
                session.score(ScoreRequest("x", tiny.prompt(20), 10))
        with engine.open(Arm("x", policy)) as session, said:
            session.generate([tiny.prompt(20)], 4)
        with said:
            engine.observe([tiny.prompt(20)], (0,), quiet)


def test_an_overflow_in_the_first_chunk_alone_is_not_forgotten(bench: Bench) -> None:
    storages = layer_storages(
        bench.arm(CachePolicy.fp8(bench.spec.num_layers, Scaling.UNIT)), bench.spec, torch.bfloat16, "storage",
        torch.device("cpu"),
    )  # fmt: skip
    layer = bench.spec.layers[0]
    attention = StoringAttention(storages, 4, NoKernel("test"))
    q, kv = (
        torch.ones(1, layer.num_attention_heads, 1, layer.head_dim),
        torch.ones(1, layer.num_kv_heads, 1, layer.head_dim),
    )
    for value in (kv * float("inf"), kv):
        attention.attend(AttentionCall(0, q, kv, value, 1.0, None, None, layer.window_tokens))
    with pytest.raises(NonFinite, match="V of layer 0"):
        attention.check_finite()


@pytest.mark.parametrize("change", [{"window_tokens": 9}, {"num_kv_heads": 4}, {"head_dim": 16}])
def test_a_geometry_that_is_not_the_models_is_noticed(tmp_path: Path, change: dict[str, Any]) -> None:
    spec = tiny.save(tiny.llama(), tmp_path)
    layers = (spec.layers[0], dataclasses.replace(spec.layers[1], **change), spec.layers[2])
    with open_engine(tmp_path, dataclasses.replace(spec, layers=layers), numerics="storage", device="cpu") as engine:
        with pytest.raises(EngineError, match="layer 1 runs with"):
            engine.observe([tiny.prompt(20)], (0,), quiet)
        with engine.open(Arm("bf16", CachePolicy.native(3))) as session, pytest.raises(EngineError, match="layer 1"):
            session.score(ScoreRequest("x", tiny.prompt(20), 10))


def test_arms_that_cannot_be_are_refused(bench: Bench) -> None:
    count = bench.spec.num_layers
    with (
        pytest.raises(PolicyNotApplied, match="brings none"),
        bench.engine.open(Arm("no scales", CachePolicy.fp8(count, Scaling.PER_HEAD))),
    ):
        pass
    with (
        pytest.raises(PolicyNotApplied, match=f"the model has {count}"),
        bench.engine.open(Arm("longer", CachePolicy.native(count + 1))),
    ):
        pass
    with (
        bench.engine.open(bench.arm(CachePolicy.uniform(count, Mantissa()))) as session,
        pytest.raises(PolicyNotApplied, match="probe"),
    ):
        session.generate([tiny.prompt(8)], 2)


def test_engine_settings_that_cannot_be_are_refused(bench: Bench, tmp_path: Path) -> None:
    with pytest.raises(StudyError, match="numerics"), open_engine(bench.folder, bench.spec, numerics="magic"):
        pass
    with (
        pytest.raises(StudyError, match="device"),
        open_engine(bench.folder, bench.spec, numerics="storage", device="abacus"),
    ):
        pass
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="tokenizer"), open_engine(tmp_path, bench.spec, numerics="storage"):
        pass


def test_threads_are_given_back(bench: Bench) -> None:
    before = torch.get_num_threads()
    with open_engine(bench.folder, bench.spec, numerics="storage", device="cpu", threads=before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before


def test_planted_range_is_seen_where_it_was_planted(tmp_path: Path) -> None:
    """A V head far beyond E4M3 at scale 1: only calibration keeps it."""
    spec = tiny.save(tiny.llama(), tmp_path)
    assert spec.layers_of(LayerKind.FULL) == (0, 1, 2)
    with open_engine(tmp_path, spec, numerics="storage", device="cpu", threads=1) as engine:
        layers: Any = engine._model.decoder_layers
        layer = layers[1].self_attn
        layer.v_proj.weight[:8] *= 2.0**14
        layer.o_proj.weight[:, : 3 * 8] *= 2.0**-14
        stats = engine.observe([tiny.prompt(40, seed=2)], (0,), quiet)
        assert stats.tensors[1, "v"].amax[0] > MAX > stats.tensors[1, "v"].amax[1]
        bench = Bench(
            engine, tmp_path, stats, {s: fit_scales(stats, spec, s) for s in Scaling if s is not Scaling.UNIT}
        )
        reference = bench.score(CachePolicy.native(3))
        drift = {s: mean_kl(bench.score(CachePolicy.fp8(3, s)), reference) for s in Scaling}
        assert drift[Scaling.UNIT] > 3 * drift[Scaling.PER_HEAD]


def edited(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> CacheSpec:
    """A tiny Llama whose stored tensors went through `change`."""
    spec = tiny.save(tiny.llama(), folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return spec


@pytest.mark.parametrize("name", [
    "model.norm.weight", "model.layers.1.mlp.up_proj.weight", "model.layers.2.self_attn.q_proj.weight",
    "model.embed_tokens.weight", "lm_head.weight",
])  # fmt: skip
def test_weights_that_are_not_there_are_refused(tmp_path: Path, name: str) -> None:
    """transformers would put random numbers in their place, and the study would go on."""
    spec = edited(tmp_path, lambda tensors: tensors.pop(name))
    with pytest.raises(ModelError, match=f"lack {name}"), open_engine(tmp_path, spec, numerics="storage", device="cpu"):
        pass


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    spec = edited(tmp_path, lambda tensors: tensors.__setitem__(name, torch.zeros(8, 48)))
    said = pytest.raises(ModelError, match=rf"{name} has the shape \[8, 48\] in the weights and \[64, 48\]")
    with said, open_engine(tmp_path, spec, numerics="storage", device="cpu"):
        pass


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_refused(tmp_path: Path, value: float) -> None:
    spec = edited(tmp_path, lambda tensors: tensors["model.norm.weight"].fill_(value))
    with (
        open_engine(tmp_path, spec, numerics="storage", device="cpu", threads=1) as engine,
        engine.open(Arm("bf16", CachePolicy.native(3))) as session,
    ):
        with pytest.raises(NonFinite, match="the logits hold NaN"):
            session.score(ScoreRequest("x", tiny.prompt(20), 10))
        with pytest.raises(NonFinite, match="the logits hold NaN"):
            session.generate([tiny.prompt(20)], 3)
        with pytest.raises(NonFinite, match="the logits hold NaN"):
            engine.probe([ScoreRequest("x", tiny.prompt(20), 10)], [], quiet)


@pytest.mark.parametrize(("key", "value", "named"), [
    ("rope_parameters", {"rope_type": [1]}, "transformers cannot"), ("hidden_size", "abc", "config.json"),
    ("dtype", "float8_e4m3fn", "dtype"), ("dtype", ["bfloat16"], "config.json"), ("pad_token_id", 9999, "cannot load"),
    ("text_config", [1], "config.json"), ("text_config", {"auto_map": {}}, "config.json"),
])  # fmt: skip
def test_a_config_that_makes_no_sense_is_named(tmp_path: Path, key: str, value: object, named: str) -> None:
    spec = tiny.save(tiny.llama(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {key: value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=named), open_engine(tmp_path, spec, numerics="storage", device="cpu"):
        pass


def test_a_model_that_prefers_tuples_runs_too(tmp_path: Path) -> None:
    spec = tiny.save(tiny.llama(return_dict=False), tmp_path)
    with (
        open_engine(tmp_path, spec, numerics="storage", device="cpu", threads=1) as engine,
        engine.open(Arm("bf16", CachePolicy.native(3))) as session,
    ):
        assert len(session.score(ScoreRequest("x", tiny.prompt(20), 10)).nll) == 10


def test_loading_a_model_says_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    spec = tiny.save(tiny.llama(), tmp_path)
    capfd.readouterr()
    shows = transformers.logging.is_progress_bar_enabled()
    with open_engine(tmp_path, spec, numerics="storage", device="cpu", threads=1):
        assert capfd.readouterr() == ("", "")
    assert transformers.logging.is_progress_bar_enabled() == shows
