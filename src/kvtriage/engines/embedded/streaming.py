"""A model larger than memory: its decoder layers are read from disk one at a time.

A batch of texts goes through the layers together: a layer is read, each text passes through it, and it is
forgotten. In memory are one layer, or two where there is room, each at the place of one before, the hidden states of
the batch, and what the texts that are inside a layer need there. Of an embedding only the rows that the batch uses
are read, and of the head nothing. Threads share the texts of a layer, and whoever finds none left reads tensors of
the next. Every text is computed by itself, as it is by a model in memory, so the results are the same bits.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic

import torch
import transformers
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch.nn.functional import embedding
from torch.overrides import TorchFunctionMode

from kvtriage.engines.embedded.attention import ATTENTION, SeenEnough, register
from kvtriage.engines.embedded.collecting import without_collecting
from kvtriage.engines.embedded.linear import ONEDNN, OneDnnLinear
from kvtriage.engines.embedded.model import LanguageModel, load_config, quiet_transformers
from kvtriage.engines.embedded.observing import SeenBy
from kvtriage.engines.embedded.weights import Weights, open_weights
from kvtriage.errors import ModelError, UnsupportedModel
from kvtriage.kvcache.spec import CacheSpec

__all__ = ["StreamedModel", "load_streamed_model"]

_LAYERS = "layers."


@dataclass(frozen=True, eq=False)
class _Passage(Generic[SeenBy]):
    """How one batch goes through the layers."""

    observer: Callable[[], SeenBy]
    """A new one, for one text in one layer."""
    seen: SeenBy
    pool: ThreadPoolExecutor
    rooms: int
    progress: Callable[[], object]


@dataclass(frozen=True, eq=False)
class _Passed(Generic[SeenBy]):
    """One text behind one layer."""

    seen: SeenBy
    beside: tuple[Any, ...] | None = None
    """What the layer returned beside hidden states; None where it returned them bare."""
    ended: bool = False
    """Whether nothing more is wanted of the text, and it has no hidden states."""


class _Unfilled(TorchFunctionMode):
    """Weights that will be read are not drawn at random before."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if func in (Tensor.uniform_, Tensor.normal_, nn.init.uniform_, nn.init.normal_):
            drawn = args[0] if args else named["tensor"]
            if drawn.is_meta:
                return drawn
        return func(*args, **named)


class _RowsFromDisk(TorchFunctionMode):
    """Rows of embeddings are read as they are asked for, by whatever a module makes of its arguments."""

    def __init__(self, weights: Weights, names: Mapping[int, str]) -> None:
        """names: of the embeddings' tensors, by their ids."""
        super().__init__()
        self._weights = weights
        self._names = names

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = self._names.get(id(args[1])) if func is embedding and len(args) > 1 else None
        if name is None:
            return func(*args, **kwargs or {})
        rows, indices = torch.unique(args[0], return_inverse=True)
        return embedding(indices, self._weights.read_rows(name, rows))


class StreamedModel:
    """Forward passes of a model whose weights stay on disk; nothing can be predicted with it."""

    def __init__(self, model: LanguageModel, weights: Weights, prefix: str, products: torch.dtype) -> None:
        """`products`: float32, or bfloat16 for the products with weights of oneDNN's."""
        self._model = model
        self._weights = weights
        self._prefix = prefix
        self._products = products
        self._rooms: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
        """Tensors of two layers, filled anew for each: what is given back is not always found again."""
        self._coming: dict[int, list[Future[None]]] = {}
        """Layers that are being read, by index."""
        self._closing = contextlib.ExitStack()
        self._embeddings: dict[int, str] = {}
        """Names of their tensors, by the tensors' ids."""
        for name, module in _outside_layers(model.decoder):
            self._prepare(name, module)
        for index, layer in enumerate(model.decoder_layers):
            layer.forward = functools.partial(self._pass_through, index, layer, layer.forward)
            self._closing.callback(delattr, layer, "forward")

    @property
    def model(self) -> LanguageModel:
        return self._model

    @property
    def products(self) -> torch.dtype:
        return self._products

    @property
    def layer_bytes(self) -> int:
        """The largest layer, as it is computed with."""
        return max(sum(self._tensor_bytes(layer)) for layer in self._model.decoder_layers)

    @property
    def largest_tensor_bytes(self) -> int:
        """Of the layers' tensors, at most this much lies mapped while a thread widens it."""
        return max(max(self._tensor_bytes(layer)) for layer in self._model.decoder_layers)

    def forward_hidden(
        self,
        token_ids: Tensor,
        observer: Callable[[], SeenBy],
        seen: SeenBy,
        *,
        pool: ThreadPoolExecutor,
        rooms: int,
        progress: Callable[[], object],
    ) -> None:
        """Token ids [B, T] through all layers, each text under an observer of its own in each, and `seen` joins them
        in the order of the texts. `rooms`: 2 to read a layer when the last texts of the one before are in it, else 1.
        `progress`: after each layer."""
        self._coming.clear()
        for room in self._rooms[rooms:]:
            room.clear()
        with _RowsFromDisk(self._weights, self._embeddings):
            self._model.forward_hidden(token_ids, _Passage(observer, seen, pool, rooms, progress))

    def close(self) -> None:
        """Let go of the model, which holds this: what loading made is never looked through by Python's collector."""
        self._closing.close()

    def _prepare(self, name: str, module: nn.Module) -> None:
        """What lies outside the layers is read now, an embedding row by row when it is asked."""
        if isinstance(module, nn.Embedding):
            stored = f"{self._prefix}{name}.weight"
            self._weights.check_shape(stored, module.weight.shape)
            self._embeddings[id(module.weight)] = stored
            return
        for own, value in _stored(module).items():
            room = torch.empty(value.shape, dtype=value.dtype)
            self._weights.read_into(f"{self._prefix}{name}.{own}" if name else self._prefix + own, room)
            setattr(module, own, _frozen(room) if isinstance(value, nn.Parameter) else room)

    def _dtypes(self, layer: nn.Module) -> dict[str, torch.dtype]:
        """What each tensor of a layer is computed with."""
        products = {f"{name}.weight" for name, module in layer.named_modules() if type(module) is OneDnnLinear}
        return {name: self._products if name in products else v.dtype for name, v in layer.state_dict().items()}

    def _tensor_bytes(self, layer: nn.Module) -> list[int]:
        values, dtypes = layer.state_dict(), self._dtypes(layer)
        return [dtypes[name].itemsize * value.numel() for name, value in values.items()]

    def _begin_layer(self, index: int, room: dict[str, Tensor], pool: ThreadPoolExecutor) -> None:
        layer = self._model.decoder_layers[index]
        shapes = {name: value.shape for name, value in layer.state_dict().items()}
        dtypes = self._dtypes(layer)
        for name in room.keys() - shapes.keys():
            del room[name]
        for name, shape in shapes.items():
            before = room.get(name)
            if before is None or (before.shape, before.dtype) != (shape, dtypes[name]):
                room[name] = torch.empty(shape, dtype=dtypes[name])

        @torch.inference_mode()
        def fill(name: str) -> None:
            self._weights.read_into(f"{self._prefix}{_LAYERS}{index}.{name}", room[name])

        self._coming[index] = [pool.submit(fill, name) for name in shapes]

    def _read_layer(self, index: int, room: dict[str, Tensor], pool: ThreadPoolExecutor) -> dict[str, Tensor]:
        if index not in self._coming:
            self._begin_layer(index, room, pool)
        for read in self._coming.pop(index):
            read.result()
        return dict(room)

    def _pass_through(
        self,
        index: int,
        layer: nn.Module,
        forward: Callable[..., Any],
        hidden: Tensor,
        *args: Any,
        kvtriage: _Passage[SeenBy],
        **kwargs: Any,
    ) -> Any:
        """A layer's own forward for each text of hidden [B, T, hidden_size], in place."""
        texts = hidden.shape[0]

        @torch.inference_mode()
        def read(text: int) -> _Passed[SeenBy]:
            own = functools.partial(_own, text=text, texts=texts)
            named = {key: own(value) for key, value in kwargs.items()}
            seen = kvtriage.observer()
            try:
                output = forward(own(hidden), *map(own, args), **named, kvtriage=seen)
            except SeenEnough:
                return _Passed(seen, ended=True)
            hidden[text] = (output[0] if isinstance(output, tuple) else output)[0]
            return _Passed(seen, output[1:] if isinstance(output, tuple) else None)

        here, there = (self._rooms[at % kvtriage.rooms] for at in (index, index + 1))
        empty = layer.state_dict()
        layer.load_state_dict(self._read_layer(index, here, kvtriage.pool), assign=True)
        passages = kvtriage.pool.map(read, range(texts))
        if kvtriage.rooms > 1 and index + 1 < len(self._model.decoder_layers):
            self._begin_layer(index + 1, there, kvtriage.pool)
        for passed in passages:
            kvtriage.seen.join(passed.seen)
        layer.load_state_dict(empty, assign=True)
        kvtriage.progress()
        if passed.ended:
            raise SeenEnough
        return hidden if passed.beside is None else (hidden, *passed.beside)


def _own(value: Any, text: int, texts: int) -> Any:
    """One text's part of an argument; what all texts have alike, whole."""
    if isinstance(value, Tensor) and value.dim() > 1 and texts > 1 and value.shape[0] == texts:
        return value[text : text + 1]
    return value


def _frozen(values: Tensor) -> nn.Parameter:
    return nn.Parameter(values, requires_grad=False)


def _stored(module: nn.Module) -> dict[str, Tensor]:
    """A module's own tensors that a checkpoint holds."""
    return {name: value for name, value in module.state_dict(keep_vars=True).items() if "." not in name}


def _outside_layers(decoder: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return ((name, module) for name, module in decoder.named_modules() if not f"{name}.".startswith(_LAYERS))


def load_streamed_model(
    folder: Path,
    spec: CacheSpec,
    device: torch.device,
    *,
    products: torch.dtype = torch.float32,
    trust_remote_code: bool,
) -> StreamedModel:
    """The model without its weights, and where they are. Raises ModelError, UnsupportedModel."""
    with without_collecting():
        built = _build(folder, trust_remote_code)
    built.eval().requires_grad_(False)
    model = LanguageModel(built, spec, device)
    if products is not torch.float32 and model.products != ONEDNN:
        raise UnsupportedModel(
            f"only oneDNN multiplies in {str(products).removeprefix('torch.')}, and this build of torch has none",
            hint="leave --compute-dtype away",
        )
    weights = open_weights(folder)
    return StreamedModel(model, weights, _find_prefix(model.decoder, weights), products)


def _build(folder: Path, trust_remote_code: bool) -> nn.Module:
    register()
    config = load_config(folder, trust_remote_code)
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedModel(
            "the weights are quantised, and layers cannot be streamed from them",
            hint="calibrate the BF16 checkpoint, or leave --memory-bound and --compute-dtype away",
        )
    auto: Any = transformers.AutoModelForCausalLM
    with quiet_transformers(), init_empty_weights(include_buffers=False), _Unfilled():
        try:
            built: nn.Module = auto.from_config(
                config, dtype=torch.float32, attn_implementation=ATTENTION, trust_remote_code=trust_remote_code
            )
        except Exception as error:  # a model's own code runs here, and may raise anything
            raise ModelError(
                f"transformers cannot build the model of {folder}: {error}",
                hint="the folder must hold a causal language model that this transformers version knows",
            ) from error
    return built


def _find_prefix(decoder: nn.Module, weights: Weights) -> str:
    """What the checkpoint puts before the decoder's own names: 'model.', 'language_model.model.', ''."""
    wanted = list(decoder.state_dict())
    tails = [name for name in weights.files if f".{name}".endswith(f".{wanted[0]}")]
    for prefix in sorted((name.removesuffix(wanted[0]) for name in tails), key=len):
        missing = next((name for name in wanted if prefix + name not in weights.files), None)
        if missing is None:
            return prefix
    lacks = missing if tails else wanted[0]
    raise UnsupportedModel(
        f"the checkpoint does not name its weights as the model does: {lacks} is not there",
        hint="its layers cannot be streamed; leave --memory-bound and --compute-dtype away and calibrate in memory",
    )
