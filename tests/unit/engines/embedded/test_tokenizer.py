"""The model's tokenizer behind the engine's contract: there and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from kvtriage.engines.base import Tokenizer as Contract
from kvtriage.engines.embedded.tokenizer import load_tokenizer

WORDS = {"the": 0, "sky": 1, "is": 2, "blue": 3, "<end>": 4}


@pytest.fixture
def tokenizer(tmp_path: Path) -> Contract:
    words = Tokenizer(models.WordLevel(WORDS, unk_token="the"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    fast: Any = transformers.PreTrainedTokenizerFast
    fast(tokenizer_object=words, eos_token="<end>").save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    return load_tokenizer(tmp_path, False)


def test_a_text_comes_back_without_what_ends_it(tokenizer: Contract) -> None:
    assert tokenizer.encode("the sky is blue") == [0, 1, 2, 3]
    assert (tokenizer.bos, tokenizer.eos) == ((), (4,))
    assert tokenizer.decode([0, 1, 4]) == "the sky"
