"""A model larger than memory: its decoder layers are read from disk one at a time.

A batch of texts goes through the layers together: a layer is read, each text passes through it, and it is
forgotten. In memory are one layer in float32, the hidden states of the batch, and what one text needs inside
a layer. Of an embedding only the rows that the batch uses are read, and of the head nothing. Every text is
computed by itself, as it is by a model in memory, so the results are the same bits.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from accelerate import init_empty_weights
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from kvtriage.engines.embedded.attention import ATTENTION, Attention, register
from kvtriage.engines.embedded.model import LanguageModel, load_config, quiet_transformers
from kvtriage.errors import ModelError, UnsupportedModel
from kvtriage.kvcache.spec import CacheSpec

__all__ = ["StreamedModel", "Weights", "load_streamed_model", "open_weights"]

_Taken = TypeVar("_Taken")
_LAYERS = "layers."
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


@dataclass(frozen=True)
class Weights:
    """The tensors of a checkpoint: name → the file that holds it."""

    files: Mapping[str, Path]

    def count_elements(self) -> int:
        """Of all tensors, by the files' headers. Raises ModelError."""
        return sum(self._look(name, lambda stored: stored.numel()) for name in self.files)

    def read(self, name: str) -> Tensor:
        """A whole tensor in float32. Raises ModelError."""
        return self._look(name, lambda stored: stored.to(torch.float32, copy=True))

    def read_rows(self, name: str, rows: Tensor) -> Tensor:
        """The given rows [n] of a matrix in float32: [n, columns]. Raises ModelError."""
        return self._look(name, lambda stored: stored[rows].to(torch.float32))

    def _look(self, name: str, take: Callable[[Tensor], _Taken]) -> _Taken:
        """The file is mapped for this one look, so that none of it stays in memory."""
        try:
            with safe_open(self.files[name], "pt") as file:
                return take(file.get_tensor(name))
        except (OSError, SafetensorError, IndexError) as error:
            raise ModelError(
                f"cannot read {name} in {self.files[name]}: {error}", hint="download or copy the file again"
            ) from error


def open_weights(folder: Path) -> Weights:
    """Which file of `folder` holds which tensor. Raises ModelError."""
    try:
        if (folder / _INDEX).is_file():
            stated = json.loads((folder / _INDEX).read_bytes())["weight_map"]
            return Weights({str(name): folder / Path(str(file)).name for name, file in stated.items()})
        with safe_open(folder / _SINGLE, "pt") as file:
            return Weights(dict.fromkeys(file.keys(), folder / _SINGLE))
    except (OSError, ValueError, KeyError, AttributeError, SafetensorError) as error:
        raise ModelError(
            f"cannot read which weights {folder} holds: {error}", hint="download or copy the model again"
        ) from error


class StreamedModel:
    """Forward passes of a model whose weights stay on disk; nothing can be predicted with it."""

    def __init__(self, model: LanguageModel, weights: Weights, prefix: str) -> None:
        self._model = model
        self._weights = weights
        self._prefix = prefix
        self._progress: Callable[[], object] = int
        for name, module in _outside_layers(model.decoder):
            self._prepare(name, module)
        for index, layer in enumerate(model.decoder_layers):
            layer.forward = functools.partial(self._pass_through, index, layer, layer.forward)

    @property
    def model(self) -> LanguageModel:
        return self._model

    @property
    def layer_bytes(self) -> int:
        """The largest layer, in float32."""
        return max(4 * sum(p.numel() for p in layer.parameters()) for layer in self._model.decoder_layers)

    @property
    def largest_tensor_bytes(self) -> int:
        """Of the layers' tensors, at most this much lies mapped while it is widened."""
        return max(4 * p.numel() for layer in self._model.decoder_layers for p in layer.parameters())

    def forward_hidden(self, token_ids: Tensor, attention: Attention, progress: Callable[[], object]) -> None:
        """Token ids [B, T] through all layers; `attention` sees one text at a time. `progress`: after each layer."""
        self._progress = progress
        self._model.forward_hidden(token_ids, attention)

    def _prepare(self, name: str, module: nn.Module) -> None:
        """What lies outside the layers is read now, an embedding row by row when it is asked."""
        if isinstance(module, nn.Embedding):
            module.padding_idx = None
            module.register_forward_pre_hook(functools.partial(self._read_rows, f"{self._prefix}{name}.weight"))
            return
        for own, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, own, _frozen(self._read(f"{name}.{own}" if name else own, parameter)))

    def _read_rows(self, name: str, module: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        rows, indices = torch.unique(arguments[0], return_inverse=True)
        module.weight = _frozen(self._weights.read_rows(name, rows))
        return (indices, *arguments[1:])

    def _read(self, name: str, like: Tensor) -> Tensor:
        found = self._weights.read(self._prefix + name)
        if found.shape != like.shape:
            raise ModelError(
                f"{self._prefix}{name} has the shape {list(found.shape)} in the weights and {list(like.shape)} by "
                "config.json",
                hint="the weights and config.json belong to different models",
            )
        return found

    def _pass_through(
        self, index: int, layer: nn.Module, forward: Callable[..., Any], hidden: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """A layer's own forward for each text of hidden [B, T, hidden_size], in place."""
        state = layer.state_dict()
        layer.load_state_dict(
            {name: self._read(f"{_LAYERS}{index}.{name}", value) for name, value in state.items()}, assign=True
        )
        texts = hidden.shape[0]
        for text in range(texts):
            own = functools.partial(_own, text=text, texts=texts)
            output = forward(own(hidden), *map(own, args), **{key: own(value) for key, value in kwargs.items()})
            hidden[text] = (output[0] if isinstance(output, tuple) else output)[0]
        layer.to("meta")
        self._progress()
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden


def _own(value: Any, text: int, texts: int) -> Any:
    """One text's part of an argument; what all texts have alike, whole."""
    if isinstance(value, Tensor) and value.dim() > 1 and texts > 1 and value.shape[0] == texts:
        return value[text : text + 1]
    return value


def _frozen(values: Tensor) -> nn.Parameter:
    return nn.Parameter(values, requires_grad=False)


def _outside_layers(decoder: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return ((name, module) for name, module in decoder.named_modules() if not f"{name}.".startswith(_LAYERS))


def load_streamed_model(
    folder: Path, spec: CacheSpec, device: torch.device, *, trust_remote_code: bool
) -> StreamedModel:
    """The model without its weights, and where they are. Raises ModelError, UnsupportedModel."""
    register()
    config = load_config(folder, trust_remote_code)
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedModel(
            "the weights are quantised, and layers cannot be streamed from them",
            hint="calibrate the BF16 checkpoint, or leave --memory-bound away",
        )
    auto: Any = transformers.AutoModelForCausalLM
    with quiet_transformers(), init_empty_weights(include_buffers=False):
        try:
            built = auto.from_config(
                config, dtype=torch.float32, attn_implementation=ATTENTION, trust_remote_code=trust_remote_code
            )
        except Exception as error:  # a model's own code runs here, and may raise anything
            raise ModelError(
                f"transformers cannot build the model of {folder}: {error}",
                hint="the folder must hold a causal language model that this transformers version knows",
            ) from error
    built.eval().requires_grad_(False)
    model = LanguageModel(built, spec, device)
    weights = open_weights(folder)
    return StreamedModel(model, weights, _find_prefix(model.decoder, weights))


def _find_prefix(decoder: nn.Module, weights: Weights) -> str:
    """What the checkpoint puts before the decoder's own names: 'model.', 'language_model.model.', ''."""
    wanted = [name for name, _ in decoder.named_parameters()]
    tails = [name for name in weights.files if f".{name}".endswith(f".{wanted[0]}")]
    for prefix in sorted((name.removesuffix(wanted[0]) for name in tails), key=len):
        missing = next((name for name in wanted if prefix + name not in weights.files), None)
        if missing is None:
            return prefix
    lacks = missing if tails else wanted[0]
    raise UnsupportedModel(
        f"the checkpoint does not name its weights as the model does: {lacks} is not there",
        hint="its layers cannot be streamed; leave --memory-bound away and calibrate in memory",
    )
