"""docs/reference/models.md, written from what the readers say.

python -m tests.unit.kvcache.readers.models_page
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kvtriage.kvcache.policy import CachePolicy
from kvtriage.kvcache.price import price_policy
from kvtriage.kvcache.readers import READERS, read_cache_spec
from kvtriage.kvcache.spec import CacheSpec, Compressor, IndexKeys, LayerKind, LayerSpec, SideCache, StateTensor
from tests.unit.kvcache.readers.published_caches import PUBLISHED
from tests.unit.kvcache.readers.shapes import read_shapes, stand_in

__all__ = ["PAGE", "render"]

PAGE = Path(__file__).resolve().parents[4] / "docs" / "reference" / "models.md"
LONG = 32768

HEAD = f"""# The models that are read

From a config.json kvtriage reads the cache of {{architectures}} architectures. The first table names them all, with a
published model for example; the second is a list of {{files}} published files. Figures are bytes of one sequence in
BF16, all layers together: what the first token takes, states and images with it, and what {LONG:,} tokens take.
Any other architecture is refused by name, and so is a key that announces a kind of cache that its reader does not know.
[Add an architecture](../extend/architecture.md) says how to teach it one.

The page is written by `python -m tests.unit.kvcache.readers.models_page`, and a test compares it with the readers.
The figures of the second table are worked out by hand, in `tests/unit/kvcache/readers/published_caches.py`, from what
the models' authors say of them; where the published files lie beside the checkout, tests read each and compare.

## What is counted

- Layers that share the cache of an earlier one, and layers without attention, hold nothing.
- A drafter in the checkpoint (MTP) holds a cache only where the engine speculates. It is not in these figures.
- Cross-attention layers hold one image, as large as the encoder takes it.
- Recurrent states, the keys of an index and what waits to be compressed are in the figures, in the types that vLLM
  0.32 keeps them in. A cache dtype changes none of them.
- vLLM 0.32 does not have a class for every architecture here. It has dropped its own for Baichuan, Llama 3.2 Vision,
  MPT and the first Qwen, and never had one for LocateAnything and VILA: their figures are what a sequence holds in
  any engine. MiniMax-M3 and Step-3.7-Flash it serves under the names `MiniMaxM3SparseForCausalLM` and
  `Step3p7ForConditionalGeneration` alone.

## By architecture

| `architectures` | example | layers | 1 token | {LONG:,} tokens |
| --- | --- | --- | ---: | ---: |
"""

FILES = f"""
## File by file

| config.json of | 1 token | {LONG:,} tokens |
| --- | ---: | ---: |
"""


def render() -> str:
    """The whole page."""
    head = HEAD.format(architectures=len(READERS), files=sum(len(names.split()) for names, _ in PUBLISHED))
    return head + "\n".join(_architectures()) + "\n" + FILES + "\n".join(_files()) + "\n"


def _architectures() -> Iterator[str]:
    shapes = read_shapes()
    for architecture in sorted(READERS, key=str.lower):
        if architecture in shapes:
            spec = read_cache_spec(shapes[architecture].config | {"architectures": [architecture]})
            short, long = (_bf16_bytes(spec, length) for length in (1, LONG))
            yield f"| `{architecture}` | {shapes[architecture].model} | {_layers(spec)} | {short:,} | {long:,} |"
        else:
            yield f"| `{architecture}` | read as `{stand_in(architecture, shapes)}` | | | |"


def _files() -> Iterator[str]:
    for names, held in PUBLISHED:
        models = ", ".join(name.split("--")[-1] for name in names.split())
        yield f"| {models} | {held.sequence_bytes(1):,} | {held.sequence_bytes(LONG):,} |"


def _bf16_bytes(spec: CacheSpec, context_len: int) -> int:
    return price_policy(spec, CachePolicy.native(spec.num_layers), (context_len,)).bf16_bytes


def _layers(spec: CacheSpec) -> str:
    """Such as "12 sliding over 128, 12 full", in the order in which they first appear."""
    counted: dict[str, int] = {}
    for layer in spec.layers:
        word = _words(layer)
        counted[word] = counted.get(word, 0) + 1
    return ", ".join(f"{count} {word}" for word, count in counted.items())


def _words(layer: LayerSpec) -> str:
    if layer.shares_with is not None:
        return "sharing"
    if layer.kind is LayerKind.STATE:
        return "recurrent"
    return " with ".join((_attention(layer), *sorted({_beside(cache) for cache in layer.beside} - {""})))


def _attention(layer: LayerSpec) -> str:
    match layer.kind:
        case LayerKind.FULL:
            return "full"
        case LayerKind.SLIDING:
            return f"sliding over {layer.window_tokens:,}"
        case LayerKind.CHUNKED:
            return f"in chunks of {layer.window_tokens:,}"
        case LayerKind.LATENT if layer.compress_ratio is not None:
            return f"latent compressed by {layer.compress_ratio}"
        case LayerKind.LATENT:
            return "latent" if layer.window_tokens is None else f"latent over {layer.window_tokens:,}"
        case LayerKind.CROSS:
            return f"crossing to {layer.encoder_tokens:,} positions"
        case LayerKind.STATE | LayerKind.NONE:
            return "without a cache"


def _beside(cache: SideCache) -> str:
    match cache:
        case StateTensor():
            return "a state"
        case IndexKeys():
            return "an index"
        case Compressor():
            return ""


if __name__ == "__main__":
    PAGE.write_text(render())
