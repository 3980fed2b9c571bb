"""What a search looks like on the terminal: before it, and after."""

from __future__ import annotations

from kvtriage.cli.dry_run_options import Speed
from kvtriage.records.frontier import Frontier, SetRow
from kvtriage.records.plan import Plan
from kvtriage.stages.ablate import ArmCost
from kvtriage.stages.search import SearchCost
from kvtriage.units import format_bytes, format_seconds, format_tokens

__all__ = ["render_cost", "render_frontier"]


def render_cost(cost: SearchCost, speed: Speed, servers: bool) -> str:
    """Three lines and their sum; of an engine of servers also how many are started."""
    parts = (
        (f"choose on up to {cost.sets} sets", ArmCost(cost.probed_tokens, 0)),
        (f"verify up to {cost.verified} arms, and BF16", ArmCost(cost.verified_tokens, cost.written_tokens)),
        (f"claim on up to {cost.claimed} sets", ArmCost(cost.claimed_tokens, 0)),
        ("total, at most", ArmCost(cost.read_tokens, cost.written_tokens)),
    )
    lines = [
        f"{what:<36}  {format_tokens(part.read_tokens + part.decoded_tokens):>11} tokens"
        f"  about {format_seconds(speed.seconds(part))}"
        for what, part in parts
    ]
    if servers:
        lines.append(
            "servers: one, in BF16, in which sets are probed and verified; where its attention takes Q in FP8 too, or "
            f"rounds to E4M3 towards zero, up to {cost.verified} more verify, and BF16's starts again after each"
        )
    return "\n".join(lines)


def render_frontier(frontier: Frontier, plan: Plan) -> str:
    """What was found, and the table, cheapest first."""
    count = len(plan.layers)
    rows = [_cells(row, frontier, count) for row in frontier.rows]
    head = ("", "layers in BF16", "held", "vs BF16", "tokens", "KL (low to high)", "margin", "beside found")
    widths = [max(len(line[column]) for line in (head, *rows)) for column in range(len(head))]
    table = [
        "  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in (head, *rows)
    ]
    said = [f"found    {frontier.explanation}"]
    said += [
        f"verified {_set(entry.skip_layers, count)}: {entry.text or 'all margins met'}" for entry in frontier.verified
    ]
    said += [f"note     {note}" for note in frontier.notes]
    foot = (
        f"KL in nats per token on {len(frontier.claim_texts)} evaluation texts, which chose nothing; held: bytes of a "
        f"sequence of {' or '.join(map(format_tokens, plan.study.buckets))} tokens; tokens: the engine's line for "
        f"max_model_len {format_tokens(frontier.max_model_len)} in {format_bytes(plan.study.memory_bytes)}; "
        "*: on the front"
    )
    return "\n".join([*said, "", *table, "", foot])


def _cells(row: SetRow, frontier: Frontier, count: int) -> tuple[str, ...]:
    interval = "" if row.low is None or row.high is None else f" ({row.low:.4f} to {row.high:.4f})"
    name = ", ".join(row.names) + (" *" if row.on_front else "")
    flags = f" [{' '.join(row.flags)}]" if row.flags else ""
    return (
        name.strip(),
        _set(row.skip_layers, count) + flags,
        format_bytes(round(row.held_bytes)),
        f"{row.bytes_ratio:.2f}x",
        format_tokens(row.reported_tokens),
        f"{row.kl:.4f}{interval}",
        {"met": "met", "unmet": "not met"}.get(row.kl_status, "can't tell"),
        _beside(row, frontier),
    )


def _set(layers: tuple[int, ...], count: int) -> str:
    """Of `count` layers."""
    if not layers:
        return "none"
    if len(layers) == count:
        return f"all {count}"
    if len(layers) > 8:
        return f"{len(layers)}: {', '.join(map(str, layers[:6]))}, ..."
    return ", ".join(map(str, layers))


def _beside(row: SetRow, frontier: Frontier) -> str:
    """Bytes and drift against the chosen set's; what cannot be told apart is a tie."""
    found = frontier.found_row
    if found is None or row is found or row.beside_found is None:
        return ""
    return f"{_more(row.held_bytes, found.held_bytes)}, {_drifts(row)}"


def _more(own: float, other: float) -> str:
    if own == other:
        return "same bytes"
    return "more bytes" if own > other else "fewer bytes"


def _drifts(row: SetRow) -> str:
    beside = row.beside_found
    if beside is None or beside.low is None or beside.high is None or beside.low <= 0 <= beside.high:
        return "drifts alike"
    return "drifts more" if beside.low > 0 else "drifts less"
