"""A plan as one JSON object. Its form is described in docs/reference/plan.md; keys are added and never change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields

from kvtriage.cli.plan.answer import EngineAnswer, PlanAnswer, Question, serve_words
from kvtriage.cli.plan.rows import log_lines
from kvtriage.kvcache.allocator import Capacity, Refusal
from kvtriage.kvcache.allocator.ranks import TensorParallelFacts
from kvtriage.kvcache.engine_args import EngineArgs
from kvtriage.kvcache.policy import CachePolicy, Scaling
from kvtriage.kvcache.price import capacity_tokens
from kvtriage.kvcache.prices.causes import Cause
from kvtriage.kvcache.prices.explain import Explanation, Price
from kvtriage.kvcache.server_args import vllm_args
from kvtriage.kvcache.spec import CacheSpec

__all__ = ["Json", "args_json", "plan_json", "refusal_json"]

SCHEMA = 1
Json = dict[str, object]


def plan_json(answer: PlanAnswer) -> Json:
    """One object for other programs. Lengths are in tokens, sizes in bytes of one GPU."""
    question = answer.question
    spec, policy = question.spec, question.policy
    return {
        "schema": SCHEMA,
        "model": {
            "model_type": spec.model_type,
            "max_model_len": spec.max_model_len,
            "layers": [asdict(layer) for layer in spec.layers],
            "draft_layers": [asdict(layer) for layer in spec.draft_layers],
        },
        "assumed": list(spec.assumed),
        "declared": asdict(question.declared),
        "policy": {"formats": list(policy.encode()), "skip_layers": list(policy.skip_layers)},
        "contexts": list(question.contexts),
        "worksheet": asdict(answer.worksheet),
        "capacity": _capacity(question),
        "engine": _engine(answer),
        "findings": [asdict(finding) for finding in question.findings],
        "tensor_parallel": None if answer.ranks is None else _ranks(answer.ranks),
        "vllm_args": list(vllm_args(policy, spec, None, question.native_dtype)),
        "serve_args": list(serve_words(question)),
    }


def _capacity(question: Question) -> Json | None:
    """Tokens of whole sequences that fit by the worksheet, for each context length that was asked for.

    None on several GPUs: the worksheet is of the whole model, and the memory that of each.
    """
    spec, args = question.spec, question.args
    num_gpus = args.tensor_parallel_size * args.pipeline_parallel_size
    if question.memory is None or num_gpus > 1:
        return None
    memory_bytes = question.memory.available_bytes
    policies = {
        "bf16_tokens": CachePolicy.native(spec.num_layers),
        "fp8_tokens": CachePolicy.fp8(spec.num_layers, Scaling.UNIT),
        "policy_tokens": question.policy,
    }
    return {
        "memory_bytes": memory_bytes,
        "rows": [
            {
                "context_len": context_len,
                **{name: _fitting(spec, policy, context_len, memory_bytes) for name, policy in policies.items()},
            }
            for context_len in sorted(set(question.contexts))
        ],
    }


def _fitting(spec: CacheSpec, policy: CachePolicy, context_len: int, memory_bytes: int) -> int | None:
    """None for a model that holds nothing."""
    try:
        return capacity_tokens(spec, policy, context_len, memory_bytes)
    except ValueError:
        return None


# --- the engine -------------------------------------------------------------------------


def _engine(answer: PlanAnswer) -> Json:
    question, engine = answer.question, answer.engine
    return {
        "version": str(question.args.version),
        "args": args_json(question.args),
        "assumed": list(question.assumed),
        "notes": list(question.notes),
        "refusal": None if answer.refusal is None else refusal_json(answer.refusal, answer.way_out),
        "unmodelled": answer.unmodelled,
        **({} if engine is None else _prices(question, engine)),
    }


def args_json(args: EngineArgs) -> Json:
    """Every flag by its name; a version, a backend and the like as words."""
    values = ((field.name, vars(args)[field.name]) for field in fields(args) if field.name != "draft_layers")
    return {name: value if isinstance(value, bool | int | None) else str(value) for name, value in values}


def refusal_json(refusal: Refusal, way_out: Sequence[str] = ()) -> Json:
    return {
        "error_type": refusal.error_type,
        "reason": refusal.reason,
        "detail": refusal.detail,
        "way_out": list(way_out),
    }


def _prices(question: Question, engine: EngineAnswer) -> Json:
    return {
        "available_bytes": engine.memory.available_bytes,
        "band": None if engine.memory.band is None else asdict(engine.memory.band),
        "bf16": _explained(engine.bf16, question),
        "fp8": _explained(engine.fp8, question),
        "policy": _explained(engine.policy, question),
        "skip_costs": [
            {
                "args": args_json(cost.args),
                "fp8_tokens": cost.fp8_tokens,
                "policy_tokens": cost.policy_tokens,
                "tokens_share": cost.tokens_share,
                "held_share": cost.held_share,
            }
            for cost in engine.skip_costs
        ],
        "trades": [
            {
                "changes": [asdict(change) for change in trade.changes],
                "args": args_json(trade.args),
                "skip_layers": list(trade.policy.skip_layers),
                "reported_tokens": trade.reported_tokens,
                "max_concurrency": trade.max_concurrency,
                "held_bytes": trade.held_bytes,
                "gain_tokens": trade.gain_tokens,
                "ratio": trade.ratio,
            }
            for trade in engine.trades
        ],
        "gains": [asdict(point) for point in engine.gains],
    }


def _explained(each: Explanation | Refusal, question: Question) -> Json:
    """With a `refusal` the figures of the line are null; without any price the pool itself is refused."""
    if isinstance(each, Refusal):
        return {"refusal": refusal_json(each), "prices": None, "capacity": None}
    return {
        "refusal": refusal_json(each.outcome) if isinstance(each.outcome, Refusal) else None,
        "prices": {
            "context_len": each.context_len,
            "max_model_len": each.max_model_len,
            "worksheet_bytes": each.worksheet_bytes,
            "held": _price(each.held),
            "peak": _price(each.peak),
            "peak_overlapped": None if each.peak_overlapped is None else _price(each.peak_overlapped),
            "reserved": _price(each.reserved),
            "kv_bytes": each.contents.kv_bytes,
            "kv_tokens": each.kv_tokens,
            "causes": [_cause(cause) for cause in (*each.beside, *each.causes)],
            "pool_causes": [_cause(cause) for cause in each.pool_causes],
            "gains_by_skipping": each.gains_by_skipping,
        },
        "capacity": _reported(each.outcome, question) if isinstance(each.outcome, Capacity) else None,
    }


def _price(price: Price) -> Json:
    return {"blocks": price.blocks, "bytes": price.reserved_bytes}


def _cause(cause: Cause) -> Json:
    return {"cause": cause.kind, "bytes": cause.reserved_bytes, "tokens": cause.tokens}


def _reported(capacity: Capacity, question: Question) -> Json:
    line = capacity.reported(question.args.version)
    return {
        "num_blocks": capacity.num_blocks,
        "bytes_per_block": capacity.pool.bytes_per_block,
        "blocks_per_request": capacity.blocks_per_request,
        "num_groups": capacity.pool.num_groups,
        "block_size": capacity.pool.rules.block_size,
        "max_model_len": capacity.max_model_len,
        "reported_tokens": line.tokens,
        "max_concurrency": line.max_concurrency,
        "tokens_by_blocks": capacity.tokens_by_blocks,
        "tokens_by_requests": capacity.reported_tokens,
        "log": list(log_lines(capacity, question)),
    }


def _ranks(ranks: TensorParallelFacts) -> Json:
    return {
        **asdict(ranks),
        "per_head_scale_bytes": ranks.per_head_scale_bytes,
        "per_tensor_scale_bytes": ranks.per_tensor_scale_bytes,
    }
