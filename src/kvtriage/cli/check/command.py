"""check: the command."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
import msgspec

from kvtriage.checkpoints.finding import Finding, Level
from kvtriage.checkpoints.overlay import read_scales
from kvtriage.cli.case_folder.layout import CHECKPOINT, CHECKPOINT_PER_TENSOR
from kvtriage.cli.case_folder.opening import open_case
from kvtriage.cli.check.answer import Checked, check_checkpoint
from kvtriage.cli.check.as_text import render_answer
from kvtriage.cli.check.live import check_live_scales
from kvtriage.cli.options import Servers
from kvtriage.cli.sources import resolve_model
from kvtriage.cli.terminal import open_progress
from kvtriage.cli.waits import WAIT
from kvtriage.errors import CaseError, ModelError
from kvtriage.kvcache.policy import Scaling
from kvtriage.records.scales import ScaleRecord
from kvtriage.records.values import scale_set

__all__ = ["SUSPECT", "check_command"]

SUSPECT = 1


@click.command("check")
@click.argument("path", metavar="CASE_OR_CHECKPOINT", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one object for each checkpoint.")
@click.option("--engine", type=click.Choice(["vllm"]), help="Compare with the scales that act in a running server.")
@click.option("--url", metavar="URL", help="A server that runs already.  [default: one is started]")
@click.option("--vllm-command", metavar="COMMAND", help="What starts a server.  [default: vllm serve]")
@click.option(
    "--engine-arg", "engine_args", multiple=True, metavar="ARG", help="An argument for the server. Repeatable."
)
@click.option(
    "--server-env",
    "variables",
    multiple=True,
    metavar="NAME=VALUE",
    help="A variable in the server's environment. Repeatable; no secrets.",
)
@click.option(
    "--start-timeout",
    type=WAIT,
    default=1800.0,
    metavar="SECONDS",
    help="How long a server may take to start.  [default: 1800]",
)
def check_command(
    path: Path,
    as_json: bool,
    engine: str | None,
    url: str | None,
    vllm_command: str | None,
    engine_args: tuple[str, ...],
    variables: tuple[str, ...],
    start_timeout: float,
) -> int:
    """Say which KV-cache scales a checkpoint holds, which are suspect, and what vLLM makes of them.

    For anybody's checkpoint: kvtriage's, llm-compressor's, ModelOpt's, auto-round's, Quark's. Only headers and the
    scales themselves are read. Exit code 0 fine, 1 suspect, 2 unreadable.

    \b
    Example:
      kvtriage check ~/models/Llama-3.1-8B-FP8
      kvtriage check case/ --engine vllm
    """
    starts = vllm_command is not None or bool(engine_args or variables)
    if engine is None and (url is not None or starts):
        raise click.UsageError("--url, --vllm-command, --engine-arg and --server-env are for --engine vllm")
    if url is not None and starts:
        raise click.UsageError(
            "--url names a server that runs: --vllm-command, --engine-arg and --server-env start one"
        )
    if str(path).startswith("demo:"):
        with open_progress() as report:
            path = resolve_model(str(path), report)
    checked = [*_checked(path)]
    if url is not None and len(checked) > 1:
        raise click.UsageError(f"--url is one server's, and {path} holds {len(checked)} checkpoints: name one of them")
    answers = []
    for one in checked:
        answer = one.answer
        if engine is not None:
            servers = Servers(vllm_command, engine_args, start_timeout_s=start_timeout, variables=variables)
            answer = answer.joined_by(check_live_scales(one, servers, url))
        answers.append(answer)
        click.echo(msgspec.json.encode(answer).decode() if as_json else render_answer(answer))
    return SUSPECT if any(answer.status != "fine" for answer in answers) else 0


def _checked(path: Path) -> Iterator[Checked]:
    """The checkpoint, or those of a case, held against its scales.json. Raises ModelError, CaseError."""
    if not (path / "plan.json").is_file():
        yield check_checkpoint(path)
        return
    with open_case(path, create=False) as case:
        record = case.need(ScaleRecord)
    there = [(name, scaling) for name, scaling in _SCALINGS if (path / name).is_dir()]
    if not there:
        raise CaseError(
            f"{path} holds no checkpoint", hint=f"'kvtriage calibrate {path}' writes it, unless the model has KV scales"
        )
    for name, scaling in there:
        yield check_checkpoint(path / name, tuple(_against(path / name, record, scaling)))


_SCALINGS = ((CHECKPOINT, Scaling.PER_HEAD), (CHECKPOINT_PER_TENSOR, Scaling.PER_TENSOR))


def _against(folder: Path, record: ScaleRecord, scaling: Scaling) -> Iterator[Finding]:
    try:
        same = read_scales(folder) == scale_set(record, scaling)
    except ModelError as error:
        yield Finding(Level.WRONG, error.message)
        return
    if same:
        yield Finding(Level.SAID, "its scales are those of scales.json, to the bit")
    else:
        yield Finding(Level.WRONG, "its scales are not those of scales.json")
