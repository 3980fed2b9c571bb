"""kvtriage: find out what an FP8 KV cache costs your model, and the cheapest repair."""

__version__ = "0.1.0"
__all__ = ["__version__"]
