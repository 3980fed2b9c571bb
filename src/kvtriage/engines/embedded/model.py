"""A transformers model, run for its numbers: forward passes in float32, one arm at a time."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from kvtriage.engines.embedded.attention import ATTENTION, Attention, SeenEnough, register
from kvtriage.engines.embedded.collecting import without_collecting
from kvtriage.engines.embedded.linear import ONEDNN, product_library, use_onednn
from kvtriage.errors import ModelError, UnsupportedModel
from kvtriage.kvcache.spec import CacheSpec

__all__ = ["LanguageModel", "load_config", "load_model", "native_dtype", "quiet_transformers"]

_NATIVE = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.bfloat16}
"""What a server stores K and V in when it does not quantise them; float32 checkpoints are served as BF16."""


class LanguageModel:
    """Forward passes with our attention. Token ids [B, T] in, logits of chosen positions out."""

    def __init__(self, model: nn.Module, spec: CacheSpec, device: torch.device) -> None:
        self._model: Any = model
        self.spec = spec
        self.device = device
        self.products = product_library(device)
        if self.products == ONEDNN:
            use_onednn(model)

    @property
    def decoder(self) -> Any:
        """All but the head."""
        return self._model.get_decoder()

    @property
    def decoder_layers(self) -> nn.ModuleList:
        layers = getattr(self.decoder, "layers", None)
        if not isinstance(layers, nn.ModuleList) or len(layers) != self.spec.num_layers:
            raise UnsupportedModel(
                f"cannot find the {self.spec.num_layers} decoder layers of {type(self._model).__name__}",
                hint="the embedded engine needs a decoder with one ModuleList of layers",
            )
        return layers

    def replica(self, before_layer: Callable[[], None]) -> LanguageModel:
        """The same weights in modules of its own, so that two threads can run passes that record or resume.

        No tensor is copied. `before_layer` is called before each layer runs, and may raise to end a pass.
        Raises UnsupportedModel for a model whose modules cannot be copied.
        """
        shared: dict[int, object] = {
            id(tensor): tensor for tensor in (*self._model.parameters(), *self._model.buffers())
        }
        try:
            modules = copy.deepcopy(self._model, shared)
        except Exception as error:  # a model's own code may keep anything in its modules
            raise UnsupportedModel(
                f"{type(self._model).__name__} cannot be run in two threads: {_first_line(error)}",
                hint="--threads 1 reads one text after another",
            ) from error
        own = LanguageModel(modules, self.spec, self.device)
        for layer in own.decoder_layers:
            layer.register_forward_pre_hook(lambda _module, _args: before_layer())
        return own

    @property
    def hidden_size(self) -> int:
        return int(self.decoder.get_input_embeddings().embedding_dim)

    @property
    def vocabulary(self) -> int:
        """Entries of a distribution."""
        return int(self.decoder.get_input_embeddings().num_embeddings)

    @property
    def widest(self) -> int:
        """Columns of the largest product within a layer."""
        return max(max(p.shape, default=0) for layer in self.decoder_layers for p in layer.parameters())

    def logits(self, token_ids: Tensor, attention: Attention, *, start: int | Tensor, keep: slice) -> Tensor:
        """Logits [B, positions, V] at the `keep` positions of token_ids [B, T], the first of which has
        absolute position `start`, of each sequence its own where it is a column [B, 1]."""
        positions = torch.arange(token_ids.shape[1], device=self.device)
        output = self._model(
            input_ids=token_ids,
            position_ids=(positions + start).view(-1, positions.shape[0]),
            use_cache=False,
            logits_to_keep=positions[keep],
            kvtriage=attention,
        )
        logits: Tensor = output.logits
        return logits.to(torch.float32)

    def forward_hidden(self, token_ids: Tensor, attention: Attention | object, *, start: int = 0) -> None:
        """Run the decoder for what passes through `attention`, or for what its layers do with another object in
        that place; nothing is predicted."""
        positions = torch.arange(start, start + token_ids.shape[1], device=self.device)
        with contextlib.suppress(SeenEnough):
            self.decoder(input_ids=token_ids, position_ids=positions[None], use_cache=False, kvtriage=attention)

    @contextlib.contextmanager
    def recording(self) -> Iterator[list[Any]]:
        """A list that fills with the output of each decoder layer, as the layer returned it."""
        outputs: list[Any] = []
        hooks = [
            layer.register_forward_hook(lambda _module, _args, output: outputs.append(output))
            for layer in self.decoder_layers
        ]
        try:
            yield outputs
        finally:
            for hook in hooks:
                hook.remove()

    @contextlib.contextmanager
    def resuming(self, outputs: Sequence[Any], layer_idx: int) -> Iterator[None]:
        """Layers below `layer_idx` answer with their recorded output instead of computing it.

        Right whenever they would compute just that: same tokens, same cache below.
        """
        below = list(self.decoder_layers)[:layer_idx]
        for layer, output in zip(below, outputs, strict=False):
            layer.forward = lambda *_args, _output=output, **_kwargs: _output
        try:
            yield
        finally:
            for layer in below:
                del layer.forward

    def tokens(self, token_ids: Sequence[Sequence[int]]) -> Tensor:
        """[B][T] to a tensor on the model's device. Raises ModelError for a token that the model does not know."""
        largest = max(max(row, default=0) for row in token_ids)
        if largest >= self.vocabulary:
            raise ModelError(
                f"the tokenizer makes token {largest}, and the weights know {self.vocabulary:,} tokens",
                hint="the tokenizer and the weights belong to different models",
            )
        return torch.tensor([list(row) for row in token_ids], dtype=torch.long, device=self.device)


def native_dtype(folder: Path) -> torch.dtype:
    """The dtype that an unquantised cache has: the checkpoint's, BF16 for a float32 one. Raises ModelError."""
    config = json.loads((folder / "config.json").read_bytes())
    parts = [part for part in (config, config.get("text_config")) if isinstance(part, dict)]
    stated = (part[key] for part in parts for key in ("dtype", "torch_dtype") if part.get(key) is not None)
    name = next(stated, "bfloat16")
    if not isinstance(name, str) or name not in _NATIVE:
        raise ModelError(f"config.json gives the dtype {name!r}", hint="known are " + ", ".join(_NATIVE))
    return _NATIVE[name]


def load_model(folder: Path, spec: CacheSpec, device: torch.device, *, trust_remote_code: bool) -> LanguageModel:
    """Load a model folder from disk in float32; never fetches anything.

    Raises ModelError, also for weights that are missing or of another shape than the model's: transformers
    would fill them with random numbers.
    """
    auto: Any = transformers
    with without_collecting(), quiet_transformers():
        register()
        config = load_config(folder, trust_remote_code)
        try:
            model, loaded = auto.AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=torch.float32,
                attn_implementation=ATTENTION,
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=trust_remote_code,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
        except Exception as error:  # a model's own code runs here, and may raise anything
            raise ModelError(
                f"transformers cannot load {folder}: {_first_line(error)}",
                hint="the folder must hold a causal language model that this transformers version knows",
            ) from error
    _check_loaded(loaded)
    model.eval().requires_grad_(False)
    return LanguageModel(model.to(device), spec, device)


def _check_loaded(loaded: Mapping[str, Any]) -> None:
    for name, stored, wanted in sorted(loaded["mismatched_keys"]):
        raise ModelError(
            f"{name} has the shape {list(stored)} in the weights and {list(wanted)} by config.json",
            hint="the weights and config.json belong to different models",
        )
    missing = sorted(loaded["missing_keys"])
    if missing:
        others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(
            f"the weights lack {missing[0]}{others}",
            hint="the download is incomplete, or the weights and config.json belong to different models",
        )


def load_config(folder: Path, trust_remote_code: bool) -> Any:
    """The configuration, without the quantisation of a checkpoint whose weights are not quantised.

    Such a checkpoint only brings scales for a KV cache, which is ours to store. Raises ModelError.
    """
    with quiet_transformers():
        try:
            config: Any = transformers.AutoConfig.from_pretrained(
                folder, local_files_only=True, trust_remote_code=trust_remote_code
            )
            config.return_dict = config.get_text_config().return_dict = True
        except Exception as error:  # validation of a hostile config raises whatever it trips over
            raise ModelError(
                f"transformers cannot read the config.json in {folder}: {_first_line(error)}",
                hint="compare it with the one that the model's authors published",
            ) from error
    match getattr(config, "quantization_config", None):
        case {"kv_cache_scheme": _, "config_groups": {**groups}} if not groups:
            del config.quantization_config
    return config


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__).strip()


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """transformers and its progress bars keep still: kvtriage talks for itself. May be nested."""
    level, bars = transformers.logging.get_verbosity(), transformers.logging.is_progress_bar_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # also that the environment forbids what is asked of a progress bar
        transformers.logging.set_verbosity(logging.ERROR)
        transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            transformers.logging.set_verbosity(level)
            if bars:
                transformers.logging.enable_progress_bar()  # type: ignore[no-untyped-call]
