"""What servers of several versions print about their cache, in the form of their own loggers. None is a real run."""

from __future__ import annotations

__all__ = ["BEFORE_0_21", "METRICS", "NEW", "OLDEST", "REFUSED", "TWO_RANKS", "WITH_DRAFTER"]

NEW = """\
(APIServer pid=4711) INFO 11-02 09:14:03 [launcher.py:380]
(APIServer pid=4711) INFO 11-02 09:14:03 [launcher.py:380]        █     █     █▄   ▄█
(APIServer pid=4711) INFO 11-02 09:14:03 [launcher.py:380]  ▄▄ ▄█ █     █     █ ▀▄▀ █  version 0.32.0
(APIServer pid=4711) INFO 11-02 09:14:03 [launcher.py:380]   █▄█▀ █     █     █     █  model   openai/gpt-oss-20b
(APIServer pid=4711) INFO 11-02 09:14:03 [launcher.py:380]    ▀▀  ▀▀▀▀▀ ▀▀▀▀▀ ▀     ▀
(APIServer pid=4711) INFO 11-02 09:14:03 [api_utils.py:286] non-default args: {'model_tag': 'openai/gpt-oss-20b', \
'model': 'openai/gpt-oss-20b', 'max_model_len': 32768, 'kv_cache_dtype': 'fp8', 'kv_cache_dtype_skip_layers': \
['sliding_window'], 'compilation_config': {'mode': <CompilationMode.VLLM_COMPILE: 3>, 'pass_config': {}}}
(APIServer pid=4711) INFO 11-02 09:14:09 [model.py:2152] Using max model len 32768
(APIServer pid=4711) INFO 11-02 09:14:09 [cache.py:361] Using fp8 data type to store kv cache. It reduces the GPU \
memory footprint and boosts the performance. Meanwhile, it may cause accuracy drop without a proper scaling factor
(APIServer pid=4711) INFO 11-02 09:14:09 [scheduler.py:307] Chunked prefill is enabled with max_num_batched_tokens=8192.
(EngineCore pid=4790) INFO 11-02 09:14:17 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: \
model='openai/gpt-oss-20b', speculative_config=None, tokenizer='openai/gpt-oss-20b', dtype=torch.bfloat16, \
max_seq_len=32768, download_dir=None, tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=1, \
decode_context_parallel_size=1, quantization=mxfp4, kv_cache_dtype=fp8, device_config=cuda, \
structured_outputs_config=StructuredOutputsConfig(backend='auto', disable_fallback=False), seed=0, \
enable_prefix_caching=True, enable_chunked_prefill=True, compilation_config={'mode': 3, 'debug_dump_path': None}
(EngineCore pid=4790) INFO 11-02 09:14:26 [cuda.py:506] Using FLASH_ATTN attention backend out of potential backends: \
['FLASH_ATTN', 'FLASHINFER', 'TRITON_ATTN'].
(EngineCore pid=4790) INFO 11-02 09:15:02 [gpu_worker.py:759] Available KV cache memory: 16.0 GiB
(EngineCore pid=4790) INFO 11-02 09:15:02 [kv_cache_utils.py:2327] GPU KV cache size: 695,981 tokens, \
Maximum concurrency for 32,768 tokens per request: 21.24x
(APIServer pid=4711) INFO:     Application startup complete.
(APIServer pid=4711) INFO 11-02 09:20:11 [logger.py:39] Received request cmpl-1: prompt: '] GPU KV cache size: 7 tokens'
"""

BEFORE_0_21 = """\
INFO 09-20 17:02:41 [api_server.py:1805] vLLM API server version 0.11.2
INFO 09-20 17:02:41 [utils.py:326] non-default args: {'model': 'openai/gpt-oss-120b', 'max_model_len': 98304, \
'gpu_memory_utilization': 0.96, 'max_num_batched_tokens': 2048, 'max_num_seqs': 6}
INFO 09-20 17:02:49 [scheduler.py:222] Chunked prefill is enabled with max_num_batched_tokens=2048.
\x1b[1;36m(EngineCore_DP0 pid=8)\x1b[0;0m INFO 09-20 17:02:58 [core.py:77] Initializing a V1 LLM engine (v0.11.2) \
with config: model='openai/gpt-oss-120b', speculative_config=None, tokenizer='openai/gpt-oss-120b', max_seq_len=98304, \
tensor_parallel_size=1, pipeline_parallel_size=1, kv_cache_dtype=auto, enable_prefix_caching=True
\x1b[1;36m(EngineCore_DP0 pid=8)\x1b[0;0m INFO 09-20 17:03:00 [cuda.py:362] Using Flash Attention backend on V1 engine.
\x1b[1;36m(EngineCore_DP0 pid=8)\x1b[0;0m INFO 09-20 17:04:31 [gpu_worker.py:298] Available KV cache memory: 8.99 GiB
\x1b[1;36m(EngineCore_DP0 pid=8)\x1b[0;0m INFO 09-20 17:04:31 [kv_cache_utils.py:1087] GPU KV cache size: 130,960 tokens
\x1b[1;36m(EngineCore_DP0 pid=8)\x1b[0;0m INFO 09-20 17:04:31 [kv_cache_utils.py:1091] Maximum concurrency for 98,304 \
tokens per request: 2.55x
"""

OLDEST = """\
INFO 10-11 08:00:12 api_server.py:528] vLLM API server version 0.6.3
INFO 10-11 08:00:12 api_server.py:529] args: Namespace(host=None, port=8000, model='meta-llama/Llama-3.1-8B-Instruct', \
max_model_len=20000, kv_cache_dtype='auto', block_size=16, tensor_parallel_size=1, enable_prefix_caching=False, \
num_gpu_blocks_override=None, speculative_model=None)
INFO 10-11 08:00:31 llm_engine.py:237] Initializing an LLM engine (v0.6.3) with config: \
model='meta-llama/Llama-3.1-8B-Instruct', speculative_config=None, max_seq_len=20000, tensor_parallel_size=1, \
kv_cache_dtype=auto
INFO 10-11 08:01:40 gpu_executor.py:122] # GPU blocks: 1952, # CPU blocks: 2048
INFO 10-11 08:01:40 gpu_executor.py:126] Maximum concurrency for 20000 tokens per request: 1.56x
"""

TWO_RANKS = """\
(APIServer pid=1) INFO 05-04 10:00:00 [utils.py:233] vLLM server version 0.24.1, serving model Qwen/Qwen2.5-14B-Instruct
(APIServer pid=1) INFO 05-04 10:00:00 [utils.py:233] non-default args: {'model': 'Qwen/Qwen2.5-14B-Instruct', \
'tensor_parallel_size': 2, 'async_scheduling': False}
(Worker_TP0 pid=41) INFO 05-04 10:01:00 [gpu_worker.py:424] Available KV cache memory: 20.31 GiB
(Worker_TP1 pid=42) INFO 05-04 10:01:00 [gpu_worker.py:424] Available KV cache memory: 20.27 GiB
(EngineCore pid=4) INFO 05-04 10:01:00 [kv_cache_utils.py:1711] GPU KV cache size: 221,376 tokens
(EngineCore pid=4) INFO 05-04 10:01:0 [kv_cache_utils.py:1716] Maximum concurrency for 32,768 tokens per request: 6.76x
"""

WITH_DRAFTER = """\
(APIServer pid=1) INFO 06-01 10:00:00 [utils.py:233] non-default args: {'model': 'Qwen/Qwen3-Next-80B-A3B-Instruct', \
'kv_cache_memory_bytes': 17179869184, 'speculative_config': {'method': 'mtp', 'num_speculative_tokens': 2}, \
'mamba_ssm_cache_dtype': 'float32'}
(EngineCore pid=4) INFO 06-01 10:00:10 [core.py:133] Initializing a V1 LLM engine (v0.30.1.dev12+gabc) with config: \
model='Qwen/Qwen3-Next-80B-A3B-Instruct', speculative_config=SpeculativeConfig(method='mtp', model='x', \
num_spec_tokens=2), max_seq_len=262144, tensor_parallel_size=4, kv_cache_dtype=auto, enable_prefix_caching=True
(EngineCore pid=4) INFO 06-01 10:00:20 [interface.py:1096] Setting attention block size to 544 tokens to ensure \
that attention page size is >= mamba page size.
(EngineCore pid=4) INFO 06-01 10:00:20 [kv_cache_utils.py:1816] Hybrid KV cache manager is disabled for this hybrid \
model
"""

REFUSED = """\
(EngineCore pid=4) INFO 07-01 10:00:10 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: \
model='google/gemma-3-27b-it', speculative_config=None, max_seq_len=131072, tensor_parallel_size=1, kv_cache_dtype=auto
(EngineCore pid=4) INFO 07-01 10:01:00 [gpu_worker.py:759] Available KV cache memory: 5.42 GiB
(EngineCore pid=4) ERROR 07-01 10:01:00 [core.py:1120] ValueError: To serve at least one request with the model's max \
seq len (131072), (12.98 GiB KV cache is needed, which is larger than the available KV cache memory (5.42 GiB). Based \
on the available memory, the estimated maximum model length is 24160. Try increasing `gpu_memory_utilization`
"""

METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="openai/gpt-oss-20b"} 0.0
# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="32",cache_dtype="fp8",enable_prefix_caching="True",engine="0",\
gpu_memory_utilization="0.92",kv_cache_dtype_skip_layers="['sliding_window']",kv_cache_layout="LBNHC",\
kv_cache_max_concurrency="21.239669421487605",kv_cache_memory_bytes="None",kv_cache_size_tokens="695981",\
mamba_block_size="None",mamba_cache_mode="none",num_gpu_blocks="43690",num_gpu_blocks_override="None",\
sliding_window="None",user_specified_block_size="False"} 1.0
"""
