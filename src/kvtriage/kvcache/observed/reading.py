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

from collections.abc import Iterable

from kvtriage.kvcache.observed.account import Observed
from kvtriage.kvcache.observed.gathered import Gathered
from kvtriage.kvcache.observed.log_lines import read_log_line
from kvtriage.kvcache.observed.metrics_page import read_metrics_line

__all__ = ["read_observed"]


def read_observed(lines: Iterable[str]) -> Observed | None:
    """None when no line is one that vLLM prints about its cache. Lines may be anything at all."""
    gathered = Gathered()
    for line in lines:
        if not read_metrics_line(line, gathered):
            read_log_line(line, gathered)
    return gathered.finish()
