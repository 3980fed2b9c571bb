"""transformers and our quantizing cache. The only room where torch and transformers live."""

from __future__ import annotations

from kvtriage.engines.embedded.engine import EmbeddedEngine, open_engine
from kvtriage.engines.embedded.tokenizer import load_tokenizer

__all__ = ["EmbeddedEngine", "load_tokenizer", "open_engine"]
