"""What a server said of itself: a vLLM log or a /metrics page, read line by line.

A log is recognised by the lines that vLLM prints when it starts, from 0.6 to 0.32 (file:line of 0.32.0):

    what was typed     'non-default args: {...}' (entrypoints/serve/utils/api_utils.py:286), or 'args: Namespace(...)'
    class              'Resolved architecture: GptOssForCausalLM' (config/model.py:733)
    version, lengths   'Initializing a V1 LLM engine (v0.32.0) with config: ...' (v1/engine/core.py:134)
    batched tokens     'Chunked prefill is enabled with max_num_batched_tokens=8192.' (config/scheduler.py:308)
    memory             'Available KV cache memory: 8.99 GiB' (v1/worker/gpu_worker.py:759)
    capacity           'GPU KV cache size: 130,960 tokens, Maximum concurrency for ...' (v1/core/kv_cache_utils.py:2327)
                       once it was two lines, and before that '# GPU blocks: 1952'
    refusal            'To serve at least one request with the model's max seq len ...' (v1/core/kv_cache_utils.py:1030)

A metrics page is recognised by `vllm:cache_config_info`, whose labels are the engine's cache settings as text
(v1/metrics/loggers.py:1120, config/cache.py:322). A label of "None" says nothing. The other metrics name the model as
it is served.

Several ranks or engines print several figures; all are kept. Where a log holds several starts, the last one counts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from kvtriage.kvcache.observed.log_values import read_pairs, read_value

__all__ = ["LOG", "METRICS", "Observed", "Reported", "Settings", "Source", "read_observed"]

Source = str
LOG: Source = "log"
METRICS: Source = "metrics"


@dataclass(frozen=True)
class Settings:
    """What the engine was told, as far as the file states it; None where it does not.

    Named as in vLLM. `kv_cache_dtype_skip_layers` None is not the same as (), which says that nothing is skipped.
    """

    version: str | None = None
    model: str | None = None
    architecture: str | None = None
    dtype: str | None = None
    max_model_len: int | None = None
    max_num_batched_tokens: int | None = None
    async_scheduling: bool | None = None
    enable_prefix_caching: bool | None = None
    tensor_parallel_size: int | None = None
    pipeline_parallel_size: int | None = None
    decode_context_parallel_size: int | None = None
    block_size: int | None = None
    kv_cache_dtype: str | None = None
    kv_cache_dtype_skip_layers: tuple[str, ...] | None = None
    disable_hybrid_kv_cache_manager: bool | None = None
    num_gpu_blocks_override: int | None = None
    num_speculative_tokens: int | None = None
    speculative_method: str | None = None
    attention_backend: str | None = None
    kv_cache_layout: str | None = None
    mamba_cache_mode: str | None = None
    mamba_cache_dtype: str | None = None
    mamba_ssm_cache_dtype: str | None = None
    kv_connector: str | None = None


@dataclass(frozen=True)
class Reported:
    """What the engine answered. One entry for each rank or engine that printed its own.

    `available_gib` has two decimals in a log, so it stands for a band of ±0.005 GiB; `available_bytes` is exact,
    where the user gave the bytes. `max_concurrency` is as printed, its decimals kept as `concurrency_decimals`.
    `is_one_line` says that tokens and concurrency stood in one line, as they do in newer versions.
    `needed_gib` and `estimated_max_len` are those of a refusal.
    """

    available_gib: tuple[float, ...] = ()
    available_bytes: int | None = None
    num_gpu_blocks: tuple[int, ...] = ()
    block_size: int | None = None
    kv_cache_tokens: tuple[int, ...] = ()
    max_concurrency: float | None = None
    concurrency_decimals: int = 2
    is_one_line: bool = False
    needed_gib: float | None = None
    estimated_max_len: int | None = None


@dataclass(frozen=True)
class Observed:
    """One start of a server. `num_starts` counts those in the file, of which this is the last.

    `shows_flags` says that the file has the line of what was typed, so that a flag it does not state was not typed.
    """

    source: Source
    settings: Settings
    reported: Reported
    shows_flags: bool = False
    num_starts: int = 1


def read_observed(lines: Iterable[str]) -> Observed | None:
    """None when no line is one that vLLM prints about its cache. Lines may be anything at all."""
    reading = _Reading()
    for line in lines:
        if (metrics := _METRICS.match(line)) is not None:
            _read_metrics(metrics[1], reading)
        elif (name := _SERVED.match(line)) is not None:
            reading.served_name = reading.served_name or name[1]
        elif _MARKS.search(line) is not None and "Received request" not in line:
            _read_line(_ANSI.sub("", line).rstrip(), reading)
    return reading.finish()


@dataclass
class _Reading:
    """What has been read so far; a new start begins it anew."""

    source: Source = LOG
    settings: dict[str, object] = field(default_factory=dict)
    available_gib: list[float] = field(default_factory=list)
    num_gpu_blocks: list[int] = field(default_factory=list)
    kv_cache_tokens: list[int] = field(default_factory=list)
    answer: dict[str, object] = field(default_factory=dict)
    shows_flags: bool = False
    num_starts: int = 1
    served_name: str | None = None

    @property
    def has_answer(self) -> bool:
        return bool(self.kv_cache_tokens or self.num_gpu_blocks or "needed_gib" in self.answer)

    def begin(self) -> None:
        if self.has_answer:
            self.num_starts += 1
            self.settings.clear()
            self.available_gib.clear()
            self.num_gpu_blocks.clear()
            self.kv_cache_tokens.clear()
            self.answer.clear()
            self.shows_flags = False

    def state(self, key: str, value: object) -> None:
        """A value of the kind that the field has, and such as a server can have; anything else states nothing."""
        kind = _KINDS.get(key)
        if kind is None or not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
            return
        if isinstance(value, bool) or not isinstance(value, int) or value in _SIZES.get(key, _ANY_SIZE):
            self.settings[key] = value

    def finish(self) -> Observed | None:
        if not (self.settings or self.has_answer or self.available_gib):
            return None
        if self.source == METRICS and self.served_name is not None:
            self.state("model", self.served_name)
        settings, answer = self.settings, self.answer
        return Observed(
            self.source,
            Settings(**settings),  # type: ignore[arg-type]
            Reported(
                available_gib=tuple(self.available_gib),
                num_gpu_blocks=tuple(self.num_gpu_blocks),
                kv_cache_tokens=tuple(self.kv_cache_tokens),
                **answer,  # type: ignore[arg-type]
            ),
            self.shows_flags,
            self.num_starts,
        )


_KINDS: Mapping[str, type] = {
    "version": str,
    "model": str,
    "architecture": str,
    "dtype": str,
    "max_model_len": int,
    "max_num_batched_tokens": int,
    "async_scheduling": bool,
    "enable_prefix_caching": bool,
    "tensor_parallel_size": int,
    "pipeline_parallel_size": int,
    "decode_context_parallel_size": int,
    "block_size": int,
    "kv_cache_dtype": str,
    "kv_cache_dtype_skip_layers": tuple,
    "disable_hybrid_kv_cache_manager": bool,
    "num_gpu_blocks_override": int,
    "num_speculative_tokens": int,
    "speculative_method": str,
    "attention_backend": str,
    "kv_cache_layout": str,
    "mamba_cache_mode": str,
    "mamba_cache_dtype": str,
    "mamba_ssm_cache_dtype": str,
    "kv_connector": str,
}
_MOST_BYTES = 2**60
_ANY_SIZE = range(1, 2**40 + 1)
_SIZES: Mapping[str, range] = {
    "block_size": range(1, 2**20 + 1),
    "tensor_parallel_size": range(1, 2**16 + 1),
    "pipeline_parallel_size": range(1, 2**16 + 1),
    "decode_context_parallel_size": range(1, 2**16 + 1),
    "num_speculative_tokens": range(2**10 + 1),
}
"""What a number may be. No server runs with others, and no figure follows from them."""


# --- a log ------------------------------------------------------------------------------

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_MARKS = re.compile(
    r"KV cache|kv cache|max_num_batched_tokens|max seq len|max model len|ax_model_len|non-default args|args: Namespace"
    r"|LLM engine \(v|server version|ersion |GPU blocks|cuda blocks|num_gpu_blocks|max[a-z ]{0,40} concurrency"
    r"|Resolved arch|Maximum conc|ync(?:hronous)? scheduling| backend|Hybrid KV|hybrid kv|block size to"
    r"|kv_cache_memory_bytes"
)
_START = r"(?:^|\] |py:\d+\] |\"message\": ?\"|msg=\"?)\s*"
_NUMBER = r"([\d,]{1,24})"


def _read_line(line: str, reading: _Reading) -> None:
    for pattern, read in _PATTERNS:
        found = pattern.search(line)
        if found is not None:
            read(found, reading)


def _read_version(found: re.Match[str], reading: _Reading) -> None:
    reading.begin()
    reading.state("version", found[1])


def _read_typed(found: re.Match[str], reading: _Reading) -> None:
    """What stood on the command line. In a Namespace a default is spelled out too, mostly as None."""
    reading.begin()
    reading.shows_flags = True
    _state_args(read_pairs(found[1]), reading)


def _state_args(pairs: Mapping[str, object], reading: _Reading) -> None:
    for key, value in pairs.items():
        match key, value:
            case "model_tag", str():
                reading.state("model", value)
            case "kv_cache_dtype_skip_layers", tuple() as words:
                reading.state(key, tuple(map(str, words)))
            case "speculative_config", dict() as config:
                reading.state("num_speculative_tokens", config.get("num_speculative_tokens"))
                reading.state("num_speculative_tokens", config.get("num_spec_tokens"))
                reading.state("speculative_method", config.get("method"))
            case "speculative_config", None:
                reading.state("num_speculative_tokens", 0)
            case "kv_transfer_config", dict() as config:
                reading.state("kv_connector", config.get("kv_connector"))
            case "kv_cache_memory_bytes", int() as count if 0 < count <= _MOST_BYTES:
                reading.answer["available_bytes"] = count
            case "attention_backend", str() as backend:
                reading.state(key, _last_word(backend))
            case "attention_config", dict() as config:
                reading.state("attention_backend", _last_word(str(config.get("backend"))))
            case "max_model_len", int() as length if length < 1:
                continue
            case _:
                reading.state(key, value)


def _last_word(text: str) -> str:
    """'<AttentionBackendEnum.FLASH_ATTN: ...>' to 'FLASH_ATTN'."""
    found = re.search(r"\.([A-Z0-9_]+)\b", text)
    return text if found is None else found[1]


def _read_engine(found: re.Match[str], reading: _Reading) -> None:
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
        _state_args({"speculative_config": pairs["speculative_config"]}, reading)


def _read_async(found: re.Match[str], reading: _Reading) -> None:
    reading.state("async_scheduling", found[1] == "enabled")


def _read_tokens(found: re.Match[str], reading: _Reading) -> None:
    reading.kv_cache_tokens.append(_whole(found[1]))
    if "CPU KV cache size" in found.string:
        reading.state("attention_backend", "CPU_ATTN")


def _read_concurrency(found: re.Match[str], reading: _Reading) -> None:
    """With several ranks the smallest: that is the one the engine keeps."""
    concurrency = float(found[2])
    known = reading.answer.get("max_concurrency")
    if not isinstance(known, float) or concurrency < known:
        reading.answer["max_concurrency"] = concurrency
        reading.answer["concurrency_decimals"] = len(found[2].partition(".")[2])
    reading.answer["is_one_line"] = "KV cache size" in found.string
    reading.state("max_model_len", _whole(found[1]))


def _read_available(found: re.Match[str], reading: _Reading) -> None:
    reading.available_gib.append(float(found[1]))


def _read_blocks(found: re.Match[str], reading: _Reading) -> None:
    reading.num_gpu_blocks.append(_whole(found[1]))


def _read_refusal(found: re.Match[str], reading: _Reading) -> None:
    reading.state("max_model_len", _whole(found[1]))
    reading.answer["needed_gib"] = float(found[2])
    reading.available_gib.append(float(found[3]))
    estimate = re.search(r"estimated maximum model length is ([\d,]{1,24})", found.string)
    if estimate is not None:
        reading.answer["estimated_max_len"] = _whole(estimate[1])


def _stating(key: str) -> Callable[[re.Match[str], _Reading], None]:
    def read(found: re.Match[str], reading: _Reading) -> None:
        reading.state(key, read_value(found[1].replace(",", "")))

    return read


def _answering(key: str) -> Callable[[re.Match[str], _Reading], None]:
    def read(found: re.Match[str], reading: _Reading) -> None:
        reading.answer[key] = _whole(found[1])

    return read


def _read_without_hybrid_manager(_: re.Match[str], reading: _Reading) -> None:
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


# --- a metrics page ---------------------------------------------------------------------

_METRICS = re.compile(r"\s*vllm:cache_config_info\{(.{0,65536}?)\}\s+1(?:\.0+)?(?:e\+?0+)?\s*$")
_SERVED = re.compile(r'vllm:\w{1,80}\{[^}]{0,1000}?\bmodel_name="([^"\\]{1,300})"')
_LABEL = re.compile(r'(\w{1,80})="((?:[^"\\]|\\.)*)"')
_LABEL_NAMES = {"cache_dtype": "kv_cache_dtype"}
_LABELS_READ = (
    *("enable_prefix_caching", "cache_dtype", "num_gpu_blocks_override", "kv_cache_dtype_skip_layers"),
    *("mamba_cache_mode", "mamba_cache_dtype", "mamba_ssm_cache_dtype", "kv_cache_layout", "kv_cache_memory_bytes"),
)


def _read_metrics(labels: str, reading: _Reading) -> None:
    """Every engine of a data-parallel server has a line of its own."""
    reading.source = METRICS
    values = {key: read_value(re.sub(r"\\(.)", r"\1", text)) for key, text in _LABEL.findall(labels)}
    _state_args(
        {_LABEL_NAMES.get(key, key): values[key] for key in _LABELS_READ if values.get(key) is not None}, reading
    )
    match values.get("num_gpu_blocks"):
        case int() as count if count > 0:
            reading.num_gpu_blocks.append(count)
    match values.get("block_size"), values.get("user_specified_block_size"):
        case int() as block_size, chosen if block_size > 0:
            reading.answer["block_size"] = block_size
            if chosen is True:
                reading.state("block_size", block_size)
    match values.get("kv_cache_size_tokens"):
        case int() as size if size > 0:
            reading.kv_cache_tokens.append(size)
    match values.get("kv_cache_max_concurrency"):
        case int() | float() as concurrency if concurrency > 0:
            reading.answer["max_concurrency"] = float(concurrency)
            reading.answer["concurrency_decimals"] = min(12, len(repr(float(concurrency)).partition(".")[2]))
