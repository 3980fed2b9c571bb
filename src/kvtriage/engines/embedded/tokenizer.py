"""The model's own tokenizer, seen through the engine contract."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import transformers

from kvtriage.engines.base import Tokenizer
from kvtriage.engines.embedded.model import load_config, quiet_transformers
from kvtriage.errors import DataError, ModelError

__all__ = ["load_tokenizer"]


class _HuggingFaceTokenizer:
    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @property
    def bos(self) -> tuple[int, ...]:
        """What the tokenizer itself puts in front of a text: its BOS, or nothing."""
        first = self._tokenizer("a", add_special_tokens=True)["input_ids"][:1]
        bos = self._tokenizer.bos_token_id
        return (bos,) if bos is not None and first == [bos] else ()

    @property
    def eos(self) -> tuple[int, ...]:
        eos = self._tokenizer.eos_token_id
        return () if eos is None else (eos,)

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def render_chat(self, messages: Sequence[dict[str, str]]) -> str:
        if self._tokenizer.chat_template is None:
            raise DataError(
                "the data holds 'messages' and this model's tokenizer has no chat template",
                hint="give the rendered conversation as 'text' instead",
            )
        try:
            text: str = self._tokenizer.apply_chat_template(list(messages), tokenize=False)
        except Exception as error:  # a template is the model's own program and may raise anything
            raise DataError(
                f"the model's chat template refuses a conversation: {error}",
                hint="roles usually have to alternate between user and assistant",
            ) from error
        return text


def load_tokenizer(folder: Path, trust_remote_code: bool) -> Tokenizer:
    """Raises ModelError when the folder has no usable tokenizer, or no usable config.json to tell its kind by."""
    load_config(folder, trust_remote_code)
    with quiet_transformers():
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=trust_remote_code
            )
        except Exception as error:  # a broken tokenizer.json raises whatever its parser raises
            raise ModelError(
                f"the tokenizer in {folder} cannot be loaded",
                hint="the folder needs tokenizer.json and tokenizer_config.json as the model's authors published them",
            ) from error
    return _HuggingFaceTokenizer(tokenizer)
