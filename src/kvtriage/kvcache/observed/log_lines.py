"""The lines of a vLLM log that say something of its cache, from release 0.6 to 0.32."""

from __future__ import annotations

import re
from collections.abc import Callable

from kvtriage.kvcache.observed.gathered import Gathered, state_args
from kvtriage.kvcache.observed.log_values import read_pairs, read_value

__all__ = ["read_log_line"]

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_MARKS = re.compile(
    r"KV cache|kv cache|max_num_batched_tokens|max seq len|max model len|ax_model_len|non-default args|args: Namespace"
    r"|LLM engine \(v|server version|ersion |GPU blocks|cuda blocks|num_gpu_blocks|max[a-z ]{0,40} concurrency"
    r"|Resolved arch|Maximum conc|ync(?:hronous)? scheduling| backend|Hybrid KV|hybrid kv|block size to"
    r"|kv_cache_memory_bytes"
)
_START = r"(?:^|\] |py:\d+\] |\"message\": ?\"|msg=\"?)\s*"
_NUMBER = r"([\d,]{1,24})"


def read_log_line(line: str, reading: Gathered) -> None:
    """Nothing happens for a line that is none of vLLM's about its cache."""
    if _MARKS.search(line) is None or "Received request" in line:
        return
    line = _ANSI.sub("", line).rstrip()
    for pattern, read in _PATTERNS:
        found = pattern.search(line)
        if found is not None:
            read(found, reading)


def _read_version(found: re.Match[str], reading: Gathered) -> None:
    reading.begin()
    reading.state("version", found[1])


def _read_typed(found: re.Match[str], reading: Gathered) -> None:
    """What stood on the command line. In a Namespace a default is spelled out too, mostly as None."""
    reading.begin()
    reading.shows_flags = True
    state_args(read_pairs(found[1]), reading)


def _read_engine(found: re.Match[str], reading: Gathered) -> None:
    """The engine's own account: its version, and values as it resolved them. Data-parallel engines each give one."""
    if "EngineCore_DP" not in found.string:
        reading.begin()
    reading.state("version", found[1])
    pairs = read_pairs(found[2])
    reading.state("max_model_len", pairs.get("max_seq_len"))
    for key in (
        "model",
        "dtype",
        "kv_cache_dtype",
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "decode_context_parallel_size",
        "enable_prefix_caching",
    ):
        reading.state(key, pairs.get(key))
    if "speculative_config" in pairs:
        state_args({"speculative_config": pairs["speculative_config"]}, reading)


def _read_async(found: re.Match[str], reading: Gathered) -> None:
    reading.state("async_scheduling", found[1] == "enabled")


def _read_tokens(found: re.Match[str], reading: Gathered) -> None:
    reading.kv_cache_tokens.append(_whole(found[1]))
    if "CPU KV cache size" in found.string:
        reading.state("attention_backend", "CPU_ATTN")


def _read_concurrency(found: re.Match[str], reading: Gathered) -> None:
    """With several ranks the smallest: that is the one the engine keeps."""
    concurrency = float(found[2])
    known = reading.answer.get("max_concurrency")
    if not isinstance(known, float) or concurrency < known:
        reading.answer["max_concurrency"] = concurrency
        reading.answer["concurrency_decimals"] = len(found[2].partition(".")[2])
    reading.state("max_model_len", _whole(found[1]))


def _read_available(found: re.Match[str], reading: Gathered) -> None:
    reading.available_gib.append(float(found[1]))


def _read_blocks(found: re.Match[str], reading: Gathered) -> None:
    reading.num_gpu_blocks.append(_whole(found[1]))


def _read_refusal(found: re.Match[str], reading: Gathered) -> None:
    reading.state("max_model_len", _whole(found[1]))
    reading.answer["needed_gib"] = float(found[2])
    reading.available_gib.append(float(found[3]))
    estimate = re.search(r"estimated maximum model length is ([\d,]{1,24})", found.string)
    if estimate is not None:
        reading.answer["estimated_max_len"] = _whole(estimate[1])


def _stating(key: str) -> Callable[[re.Match[str], Gathered], None]:
    def read(found: re.Match[str], reading: Gathered) -> None:
        reading.state(key, read_value(found[1].replace(",", "")))

    return read


def _answering(key: str) -> Callable[[re.Match[str], Gathered], None]:
    def read(found: re.Match[str], reading: Gathered) -> None:
        reading.answer[key] = _whole(found[1])

    return read


def _read_without_hybrid_manager(_: re.Match[str], reading: Gathered) -> None:
    reading.state("disable_hybrid_kv_cache_manager", True)


def _whole(text: str) -> int:
    return int(text.replace(",", "") or 0)


_PATTERNS = tuple(
    (re.compile(pattern), read)
    for pattern, read in (
        (_START + r"vLLM (?:API )?server version v?([0-9][\w.+-]{0,60}?),?(?:\s|$)", _read_version),
        (r"█[^█]{0,100}\bversion\s+v?([0-9][\w.+-]{0,60})", _read_version),
        (_START + r"(?:non-default args: |args: )((?:\{|Namespace\().*)", _read_typed),
        (
            _START + r"Initializing an? (?:V1 |V0 )?LLM engine \(v([0-9][\w.+-]{0,60})\) with config: (.*)",
            _read_engine,
        ),
        (_START + r"Resolved architectures?: (\w{1,100})", _stating("architecture")),
        (_START + r"Using max model len ([\d,]{1,24})", _stating("max_model_len")),
        (_START + r"Auto-fit max_model_len: reduced from \d+ to (\d{1,18})", _stating("max_model_len")),
        (
            _START + r"Chunked prefill is enabled with max_num_batched_tokens=(\d{1,18})",
            _stating("max_num_batched_tokens"),
        ),
        (_START + r"Async(?:hronous)? scheduling (?:is|will be|not|was) .{0,400}?\b(enabled|disabled)\b", _read_async),
        (_START + r"Using ([A-Z0-9_]{3,40})(?: attention)? backend", _stating("attention_backend")),
        (_START + r"Using (fp8\w{0,20}) data type to store kv cache", _stating("kv_cache_dtype")),
        (_START + r"(?:Hybrid KV cache manager is disabled|Turning off hybrid kv cache)", _read_without_hybrid_manager),
        (
            _START + r"Overriding num_gpu_blocks=\d+ with num_gpu_blocks_override=(\d{1,18})",
            _stating("num_gpu_blocks_override"),
        ),
        (_START + r"Setting attention block size to (\d{1,18}) tokens", _answering("block_size")),
        (_START + r"Available KV cache memory: (\d{1,9}\.\d{1,9}) GiB", _read_available),
        (_START + r"Initial free memory .{0,400} reserved (\d{1,9}\.\d{1,9}) GiB memory for KV Cache", _read_available),
        (_START + r"# (?:GPU|cuda|CUDA|rocm|xpu) blocks: " + _NUMBER, _read_blocks),
        (r"cache_config_info with initialization after num_gpu_blocks is: " + _NUMBER, _read_blocks),
        (_START + r"[\w +]{2,16} KV cache size: " + _NUMBER + r" tokens", _read_tokens),
        (
            r"(?:^|[\]\",] ?)Maximum concurrency for " + _NUMBER + r" tokens per request: (\d{1,15}(?:\.\d{1,15})?)x",
            _read_concurrency,
        ),
        (
            r"max seq len \(" + _NUMBER + r"\), \(?(\d{1,9}\.\d{1,9}) GiB KV cache is needed.{0,400}?"
            r"KV cache memory \((\d{1,9}\.\d{1,9}) GiB\)",
            _read_refusal,
        ),
    )
)
