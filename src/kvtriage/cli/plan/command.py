"""`kvtriage plan`: what a cache policy costs and what the engine will report, from a config.json alone.

Answering for a file on disk loads neither torch nor numpy; demo models and hub ids load what they need, and
what only --against, --sweep and --cases need is loaded with them.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import click

from kvtriage.cli.plan.answer import PlanAnswer, answer
from kvtriage.cli.plan.engine_flags import EngineFlags, engine_options
from kvtriage.cli.plan.gpu_names import complete_gpu, print_gpu_names
from kvtriage.cli.plan.model import load_model
from kvtriage.cli.plan.question import CACHE_DTYPES, Asked, open_question
from kvtriage.cli.plan.spelling import VLLM_SKIP, PlanCommand, Spelling
from kvtriage.cli.plan.words import NATIVE, parse_memories, parse_skip
from kvtriage.errors import ModelError, StudyError, UnsupportedModel
from kvtriage.files import write_atomic, writing
from kvtriage.kvcache.allocator import Reason, Refusal
from kvtriage.kvcache.policy import Scaling

__all__ = ["plan_command"]

TOLD = "the answer says why"


@click.command("plan", cls=PlanCommand, short_help="Price a cache policy from a config.json.")
@click.argument("model", required=False)
@click.option(
    "--context",
    "contexts",
    multiple=True,
    metavar="TOKENS",
    help="Length of one sequence of the batch, such as 32K (32,768; 32k is 32,000, as vLLM reads it); "
    "repeat it, or separate by commas.  [default: --max-model-len]",
)
@click.option(
    "--skip", VLLM_SKIP, metavar="LAYERS", help="Layers kept in BF16: sliding_window, full_attention, or 0,5,7-9."
)
@click.option(
    "--scaling",
    type=click.Choice([*(scaling.value for scaling in Scaling), NATIVE]),
    help="How FP8 is scaled; unit is scale 1, native is all BF16.  "
    "[default: per_head, per_tensor where the GPU cannot do that]",
)
@click.option(
    "--kv-cache-dtype",
    "cache_dtype",
    type=click.Choice(CACHE_DTYPES),
    help="The same as vLLM says it: bfloat16 is native, auto what the checkpoint declares.",
)
@click.option(
    "--memory",
    "--kv-cache-memory-bytes",
    "memories",
    multiple=True,
    metavar="BYTES",
    help="Cache memory of each GPU, such as 16GiB; with --sweep a list.",
)
@click.option(
    "--gpu",
    metavar="NAME",
    is_eager=True,
    callback=print_gpu_names,
    shell_complete=complete_gpu,
    help="The GPU that will serve, such as h100-80g; 'help' in its place lists them.",
)
@click.option(
    "--weights-gib",
    metavar="GIB",
    help="Size of the weights, all GPUs together, in place of --memory; needs --gpu.",
)
@click.option(
    "--utilization",
    "--gpu-memory-utilization",
    type=click.FloatRange(0, 1, min_open=True),
    metavar="SHARE",
    help="Of the GPU, with --weights-gib.  [default: 0.92]",
)
@click.option(
    "--against",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Compare with a vLLM log or a saved /metrics page.",
)
@click.option("--sweep", "is_sweep", is_flag=True, help="Price every skip that is easily said, over lists.")
@click.option("--set", "sets", multiple=True, metavar="LAYERS", help="Another set of layers to skip, with --sweep.")
@click.option("--svg", metavar="FILE", type=click.Path(path_type=Path), help="Also draw the sweep.")
@click.option("--explain", is_flag=True, help="Say where every byte goes, and all that other settings would do.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--markdown", "as_markdown", is_flag=True, help="Print Markdown for a ticket.")
@click.option(
    "--cases",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Answer cases of vLLM's allocator instead, one JSON object a line; with --json.",
)
@engine_options
@click.pass_context
def plan_command(
    ctx: click.Context,
    model: str | None,
    contexts: tuple[str, ...],
    skip: str | None,
    scaling: str | None,
    cache_dtype: str | None,
    memories: tuple[str, ...],
    gpu: str | None,
    weights_gib: str | None,
    utilization: float | None,
    engine: EngineFlags,
    against: Path | None,
    is_sweep: bool,
    sets: tuple[str, ...],
    svg: Path | None,
    explain: bool,
    as_json: bool,
    as_markdown: bool,
    cases: Path | None,
) -> int:
    """Price a cache policy for MODEL: a folder, a config.json, a demo: model or a hub id.

    No weights are needed. Given the memory for the cache, it says what vLLM will report at its start, and why.

    \b
    Examples:
      kvtriage plan demo:gemma3-270m --context 32768 --skip sliding_window --memory 4GiB
      kvtriage plan gpt-oss-20b/ --gpu h100-80g --weights-gib 13 --max-model-len 32768
      kvtriage plan gpt-oss-20b/ --sweep --memory 16GiB --context 8192,32768
      kvtriage plan gpt-oss-20b/ --against server.log

    Exit codes: 0 done, 2 bad input, or vLLM would not start; --against has 0 agrees, 1 differs, 3 cannot be told.
    """
    if cases is not None:
        _answer_cases(cases, alone=_typed(ctx) <= {"cases", "as_json"}, as_json=as_json)
        return 0
    if as_json and as_markdown:
        raise click.UsageError("--json and --markdown are two forms of one answer: choose one.")
    form = "json" if as_json else "markdown" if as_markdown else "text"
    if model is None:
        raise click.UsageError("Missing argument 'MODEL'.")
    if (sets or svg is not None) and not is_sweep:
        raise click.UsageError("--set and --svg belong to --sweep.")
    if explain and (is_sweep or against is not None):
        raise click.UsageError("--explain is about one policy: leave out --sweep and --against.")
    asked = Asked(
        *(contexts, skip, scaling, memories, gpu, weights_gib, utilization, engine),
        cache_dtype=cache_dtype,
        spelling=Spelling.of(ctx),
    )
    if against is not None:
        if is_sweep:
            raise click.UsageError("--against and --sweep are two questions: ask one.")
        return _compare(model, asked, against, form, says_policy=bool(_typed(ctx) & {"skip", "scaling", "cache_dtype"}))
    if is_sweep:
        return _sweep(model, asked, sets, svg, form)
    return _plan(model, asked, form, in_full=explain)


def _typed(ctx: click.Context) -> frozenset[str]:
    """Names of the parameters that stood on the command line."""
    return frozenset(
        name for name in ctx.params if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
    )


# --- one policy -------------------------------------------------------------------------


def _plan(model: str, asked: Asked, form: str, *, in_full: bool) -> int:
    """What can be said is printed first; what vLLM would refuse is an error all the same."""
    config, hf_quant_config = load_model(model)
    found = answer(open_question(config, hf_quant_config, asked))
    match form:
        case "json":
            from kvtriage.cli.plan.as_json import plan_json

            click.echo(json.dumps(plan_json(found), indent=2))
        case "markdown":
            from kvtriage.cli.plan.as_markdown import render_markdown

            click.echo(render_markdown(found, in_full=in_full), nl=False)
        case _:
            from kvtriage.cli.plan.as_text import render_plan

            click.echo(render_plan(found, in_full=in_full), nl=False)
    _raise_refusal(found, is_told=form != "json")
    return 0


def _raise_refusal(found: PlanAnswer, *, is_told: bool) -> None:
    """`is_told` where the answer says in words what vLLM refuses: the error then does not say it again."""
    because = TOLD if is_told else ""
    if found.unmodelled is not None and found.question.memory is not None:
        raise UnsupportedModel(
            f"the engine's figures cannot be told: {because or found.unmodelled}",
            hint="what the cache holds is above; leave --memory out to ask for that alone",
        )
    if found.refusal is not None:
        raise StudyError(
            f"vLLM would not start: {because or found.refusal.detail}", hint=_way_out(found, found.refusal)
        )
    if found.question.declared.refused is not None:
        raise ModelError(
            f"vLLM does not load this checkpoint: {because or found.question.declared.refused}",
            hint="ask about another checkpoint of the model; what the cache would hold is above",
        )
    for finding in found.refused_by:
        raise StudyError(f"vLLM would not start: {because or finding.sentence}", hint=finding.hint)


def _way_out(found: PlanAnswer, refusal: Refusal) -> str:
    """In flags that plan takes; a layout is an environment variable of the server."""
    if found.way_out:
        flags = [flag.replace("VLLM_KV_CACHE_LAYOUT=", "--kv-cache-layout ") for flag in found.way_out]
        return f"ask again with {' or '.join(flags)}"
    if refusal.reason in (Reason.REQUEST, Reason.MEMORY, Reason.LENGTH):
        return "give it more --memory, a lower --max-model-len, or --max-model-len auto for the longest that fits"
    if refusal.reason in (Reason.HEADS, Reason.CONTEXT_PARALLEL, Reason.STAGES):
        return "choose other numbers of GPUs: --tensor-parallel-size, --pipeline-parallel-size and their like"
    return "leave out the flag that the reason names, or choose other layers to skip"


# --- other questions --------------------------------------------------------------------


def _compare(model: str, asked: Asked, path: Path, form: str, *, says_policy: bool) -> int:
    from kvtriage.cli.plan import against
    from kvtriage.kvcache.observed.comparison import compare

    observed = against.load_observed(path)
    config, hf_quant_config = load_model(model)
    question = open_question(config, hf_quant_config, asked)
    comparison = compare(
        question.spec,
        observed,
        flags=asked.engine.typed,
        policy=question.policy if says_policy else None,
        available_bytes=None if question.memory is None else question.memory.available_bytes,
        auto=question.declared.cache_dtype,
        model=against.asked_model(model, config, question.native_dtype),
    )
    assumed = question.spec.assumed
    match form:
        case "json":
            click.echo(against.render_comparison_json(observed, comparison, assumed))
        case "markdown":
            click.echo(against.render_comparison_markdown(comparison, assumed), nl=False)
        case _:
            click.echo(against.render_comparison(path, observed, comparison, assumed), nl=False)
    return against.EXIT_CODES[comparison.outcome]


def _sweep(model: str, asked: Asked, sets: tuple[str, ...], svg: Path | None, form: str) -> int:
    from kvtriage.cli.plan import sweep_forms
    from kvtriage.cli.plan.plot import draw_svg
    from kvtriage.cli.plan.sweep import run_sweep

    memories = parse_memories(asked.memories, asked.spelling.memory)
    config, hf_quant_config = load_model(model)
    question = open_question(config, hf_quant_config, replace(asked, memories=asked.memories[:0]))
    if not memories and question.memory is not None:
        memories = (question.memory.available_bytes,)
    if not memories:
        raise StudyError("--sweep needs the memory of the cache", hint="give --memory 16GiB, or a list of amounts")
    own = [parse_skip(text, question.spec, "--set") for text in sets]
    found = run_sweep(question, own, memories)
    if svg is not None:
        with writing(svg):
            write_atomic(svg, draw_svg(sweep_forms.sweep_panels(found)).encode())
    match form:
        case "json":
            click.echo(json.dumps(sweep_forms.sweep_json(found), indent=2))
        case "markdown":
            click.echo(sweep_forms.render_sweep_markdown(found), nl=False)
        case _:
            click.echo(sweep_forms.render_sweep(found), nl=False)
    return 0


def _answer_cases(path: Path, *, alone: bool, as_json: bool) -> None:
    from kvtriage.cli.plan.cases import answer_lines

    if not alone:
        raise click.UsageError("--cases brings models and flags of its own: leave the others out.")
    if not as_json:
        raise click.UsageError("--cases answers in lines of JSON: add --json.")
    for line in answer_lines(path):
        click.echo(line)
