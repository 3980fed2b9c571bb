"""`kvtriage explore`: a page on the loopback to play with policies, or to follow a study as it runs."""

from __future__ import annotations

import os
import webbrowser
from pathlib import Path

import click

from kvtriage.cli.case_folder.folder import CaseFolder
from kvtriage.cli.case_folder.layout import CHECKPOINTS, TRIALS
from kvtriage.cli.case_folder.opening import check_folder
from kvtriage.cli.plan.gpu_names import complete_gpu, print_gpu_names
from kvtriage.cli.plan.model import load_model
from kvtriage.cli.plan.words import parse_memories
from kvtriage.cli.sources import resolve_model
from kvtriage.cli.terminal import one_line, say
from kvtriage.errors import CaseError, StudyError
from kvtriage.explore.server import Explored, open_server
from kvtriage.explore.subject import Subject
from kvtriage.explore.watch import CaseWatch
from kvtriage.files import refuse_unwritable_name
from kvtriage.kvcache.declared import read_declared_cache, read_model_dtype
from kvtriage.kvcache.policy import CachePolicy, Scaling
from kvtriage.kvcache.readers import read_cache_spec
from kvtriage.kvcache.spec import CacheSpec
from kvtriage.kvcache.support.backend_choice import pick_backend
from kvtriage.kvcache.support.gpus import Gpu, find_gpu
from kvtriage.units import GIB

__all__ = ["explore_command"]


@click.command("explore")
@click.argument("source", metavar="[MODEL|CASE]", default=".")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port on 127.0.0.1.  [default: a free one]")
@click.option("--memory", metavar="BYTES", help="Cache memory to start with, such as 16GiB.  [default: the case's]")
@click.option(
    "--gpu",
    metavar="NAME",
    is_eager=True,
    callback=print_gpu_names,
    shell_complete=complete_gpu,
    help="Check attention backends for this GPU, such as h100-80g; 'help' lists them.",
)
@click.option("--open", "opens", is_flag=True, help="Also open it in your browser.")
def explore_command(source: str, port: int, memory: str | None, gpu: str | None, opens: bool) -> None:
    """Open a page that prices any policy of MODEL, or of the model of CASE, as you click. Ctrl-C stops it.

    A case brings what it has measured, and a study that is running is followed trial by trial. Nothing is written,
    nothing is asked of the network, and only this machine can see the page.

    \b
    Examples:
      kvtriage explore demo:gemma3-270m
      kvtriage explore case/ --open
    """
    refuse_unwritable_name(source, "model or case")
    explored = _explored(source, memory, None if gpu is None else find_gpu(gpu))
    with open_server(explored, port) as server:
        click.echo(server.url)
        say(f"exploring {one_line(source)}; Ctrl-C stops it")
        if opens:
            webbrowser.open(server.url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            say("stopped")


def _explored(source: str, memory: str | None, gpu: Gpu | None) -> Explored:
    path = Path(source)
    if os.path.lexists(path / "plan.json"):
        if memory is not None:
            raise StudyError("--memory is for a model alone: a case has its own", hint="change it on the page")
        watch = _watch_case(path, gpu)
        return Explored(watch.subject, watch)
    if source == ".":
        raise CaseError("this folder is no case: it has no plan.json", hint="name a model or a case folder")

    def quietly(what: str, done: int, total: int) -> None:
        """The folder is there by then."""

    config, hf_quant_config = load_model(source)
    sizes = (16 * GIB,) if memory is None else parse_memories((memory,))
    if len(sizes) != 1:
        raise StudyError("--memory is one amount here", hint="the page has a slider for it")
    spec = read_cache_spec(config)
    subject = Subject(
        title=source,
        folder=str(resolve_model(source, quietly)) if source.startswith("demo:") else source,
        spec=spec,
        native_dtype=read_model_dtype(config, has_bfloat16=True).served,
        gpu=gpu,
        declared=read_declared_cache(config, hf_quant_config),
        memory_bytes=sizes[0],
        scaling=_first_scaling(spec, gpu),
    )
    return Explored(lambda: subject)


def _first_scaling(spec: CacheSpec, gpu: Gpu | None) -> Scaling:
    """Per head, as far as the GPU is known to take a scale for each head: a page does not begin with a refusal."""
    if gpu is None or pick_backend(spec, CachePolicy.fp8(spec.num_layers, Scaling.PER_TENSOR), gpu).serves_per_head:
        return Scaling.PER_HEAD
    return Scaling.PER_TENSOR


def _watch_case(path: Path, gpu: Gpu | None) -> CaseWatch:
    """Without its lock: whoever works on the case keeps it."""
    check_folder(path, create=False)
    folder = path.resolve()

    def models() -> dict[Scaling, str]:
        return {scaling: str(folder / name) for scaling, name in CHECKPOINTS.items() if (folder / name).is_dir()}

    return CaseWatch(CaseFolder(folder), TRIALS, models, gpu)
