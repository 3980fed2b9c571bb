"""A vLLM plug-in: E4M3 KV caches on any CPU, with per-tensor or per-head scales.

vLLM calls `register` in each of its processes, before it chooses an attention backend. From then
on its name CPU_ATTN stands for `kvtriage_vllm_cpu.backend.Backend`. Importing this package imports
nothing of vLLM.
"""

from __future__ import annotations

__all__ = ["SUPPORTED", "UnsupportedVersion", "is_supported", "register"]

SUPPORTED = "0.32"
"""The vLLM release this was tested with: its patch releases pass, no other does."""


class UnsupportedVersion(RuntimeError):
    """This vLLM is not the one the plug-in was tested with."""


def is_supported(version: str) -> bool:
    """'0.32.0' and '0.32.1+cpu' are; '0.33.0' and '0.320.0' are not."""
    return version.split("+")[0].split(".")[:2] == SUPPORTED.split(".")


def register() -> None:
    """Put the backend in the place of vLLM's CPU_ATTN; doing so twice changes nothing.

    Raises UnsupportedVersion, which ends the start of the server: going on would serve something
    else than was asked for, without a word.
    """
    import vllm

    if not is_supported(vllm.__version__):
        raise UnsupportedVersion(
            f"kvtriage-vllm-cpu was tested with vLLM {SUPPORTED} and this is {vllm.__version__}: "
            f"install vLLM {SUPPORTED}, or uninstall kvtriage-vllm-cpu to serve without it"
        )
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CPU_ATTN, "kvtriage_vllm_cpu.backend.Backend")
