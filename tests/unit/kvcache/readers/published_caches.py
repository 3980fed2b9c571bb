"""What a sequence of each published model holds in BF16, worked out by hand from what its authors say of it.

Nothing here is read from a config.json, and nothing of the readers is used: layers, heads and widths are those of model
cards and papers, and of vLLM 0.32's model code for what stands beside K and V.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PUBLISHED", "Held"]

Rates = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Held:
    """Bytes. `each` for every token; (W, bytes) for each of the last W; (n, bytes) for every n tokens; `once`."""

    each: int = 0
    last: Rates = ()
    every: Rates = ()
    once: int = 0

    def sequence_bytes(self, context_len: int) -> int:
        """What one sequence of so many tokens holds."""
        last = sum(size * min(window, context_len) for window, size in self.last)
        every = sum(size * (context_len // ratio) for ratio, size in self.every)
        return self.each * context_len + last + every + self.once


def kv(heads: int, dim: int) -> int:
    """K and V of one position in one layer, two bytes an element."""
    return 2 * heads * dim * 2


# A latent of 512 and 64 rotary elements. A key of the index: 128 E4M3 bytes and a float32 scale.
LATENT = 2 * (512 + 64)
INDEX_KEY = 128 + 4

# DeepSeek V4: vectors of 512. What waits to be compressed is float32, a value and a weight for each element, and
# twice that where groups overlap, which those of 4 do.
V4_VECTOR = 2 * 512
V4_WAITING_128 = 4 * 2 * 512
V4_WAITING_4 = 4 * 2 * 2 * (512 + 128)


def deepseek_v4(window_only: int, by_4: int, by_128: int) -> Held:
    """Layers by what they compress."""
    return Held(
        last=(
            (128, (window_only + by_4 + by_128) * V4_VECTOR),
            (128, by_128 * V4_WAITING_128),
            (8, by_4 * V4_WAITING_4),
        ),
        every=((4, by_4 * (V4_VECTOR + INDEX_KEY)), (128, by_128 * V4_VECTOR)),
    )


def delta_net(key_heads: int, value_heads: int, state_bytes: int = 4) -> int:
    """One layer of a gated delta net, heads of 128: three inputs of a convolution in BF16, and a state."""
    return 3 * (2 * key_heads + value_heads) * 128 * 2 + value_heads * 128 * 128 * state_bytes


def mamba2(heads: int, state: int) -> int:
    """One layer of Mamba-2, heads of 64 and 8 groups: three inputs of a convolution in BF16, and a float32 state."""
    return 3 * (heads * 64 + 2 * 8 * state) * 2 + heads * 64 * state * 4


# Kimi Delta Attention, 96 heads of 128: three convolutions with three inputs each, and a float32 state.
KDA = 3 * 3 * 96 * 128 * 2 + 96 * 128 * 128 * 4

# A layer of LFM2 that convolves: the last two inputs of 2,048 channels.
LFM2_CONV = 2 * 2048 * 2

# An image of Llama 3.2 Vision: four tiles of 560 pixels, patches of 14, and a class token for each tile.
TILED_IMAGE = 4 * (40 * 40 + 1)

PUBLISHED: tuple[tuple[str, Held], ...] = (
    # --- every layer full
    ("infsim--llama-2-7b-hf sophgo--llama-2-7b-chat-hf sophgo--LWM-Text-Chat-1M", Held(32 * kv(32, 128))),
    ("sophgo--llama-2-13b-chat-hf", Held(40 * kv(40, 128))),
    ("infsim--codellama-34b-instruct-hf", Held(48 * kv(8, 128))),
    ("infsim--llama-3.1-8b-instruct meta-llama--Meta-Llama-3.1-8B", Held(32 * kv(8, 128))),
    (
        "infsim--llama-3.1-70b-instruct meta-llama--Meta-Llama-3.1-70B nvidia--Llama-3.1-70B-Instruct-FP8 "
        "llama2-70b_nxd",
        Held(80 * kv(8, 128)),
    ),
    ("meta-llama--Meta-Llama-3.1-405B", Held(126 * kv(8, 128))),
    ("sophgo--Llama-3.2-3B", Held(28 * kv(8, 128))),
    ("sophgo--Megrez-3B-Instruct", Held(32 * kv(10, 64))),
    ("sophgo--Yi-6B-Chat", Held(32 * kv(4, 128))),
    ("infsim--yi-34b", Held(60 * kv(8, 128))),
    (
        "ibm--granite-3.3-8b-instruct ibm--granite-3.3-8b-instruct-FP8 ibm--granite-4-8b-dense "
        "ibm--granite-4-8b-dense-hybrid",
        Held(40 * kv(8, 128)),
    ),
    ("ibm--micro-g3.3-8b-instruct-1b", Held(4 * kv(8, 128))),
    ("sophgo--Qwen1.5-0.5B-Chat", Held(24 * kv(16, 64))),
    ("sophgo--Qwen1.5-1.8B-Chat sophgo--Qwen-1_8B-Chat", Held(24 * kv(16, 128))),
    ("sophgo--Qwen1.5-4B-Chat", Held(40 * kv(20, 128))),
    (
        "sophgo--Qwen1.5-7B-Chat sophgo--Qwen-7B-Chat sophgo--CodeFuse-DevOps-Model-7B-Chat",
        Held(32 * kv(32, 128)),
    ),
    ("sophgo--Qwen-14B-Chat", Held(40 * kv(40, 128))),
    ("sophgo--Qwen-72B-Chat", Held(80 * kv(64, 128))),
    ("sophgo--Qwen2-1.5B-Instruct sophgo--Qwen2-VL", Held(28 * kv(2, 128))),
    (
        "sophgo--Qwen2-7B-Instruct infsim--qwen2.5-7b-instruct sophgo--MiniCPM-V-2_6 sophgo--Molmo-7B-D-0924",
        Held(28 * kv(4, 128)),
    ),
    ("sophgo--Qwen2-72B-Instruct", Held(80 * kv(8, 128))),
    ("sophgo--Qwen2.5-VL-3B sophgo--LocateAnything", Held(36 * kv(2, 128))),
    ("sophgo--Qwen2-Audio-7B", Held(32 * kv(32, 128))),
    ("Qwen--Qwen3-0.6B Qwen--Qwen3-1.7B Qwen--Qwen3-VL-2B-Instruct", Held(28 * kv(8, 128))),
    (
        "sophgo--Qwen3-4B Qwen--Qwen3-8B Qwen--Qwen3-VL-4B-Instruct sophgo--Qwen3-VL-4B Qwen--Qwen3-VL-8B-Instruct",
        Held(36 * kv(8, 128)),
    ),
    ("infsim--qwen3-14b", Held(40 * kv(8, 128))),
    (
        "Qwen--Qwen3-32B Qwen--Qwen3-32B-FP8 Qwen--Qwen3-32B-FP8-Static-PerTensor Qwen--Qwen3-VL-32B-Instruct",
        Held(64 * kv(8, 128)),
    ),
    (
        "Qwen--Qwen3-30B-A3B Qwen--Qwen3-30B-A3B-FP8 Qwen--Qwen3-30B-A3B-Instruct-2507 Qwen--Qwen3-VL-30B-A3B-Instruct",
        Held(48 * kv(4, 128)),
    ),
    (
        "Qwen--Qwen3-235B-A22B Qwen--Qwen3-235B-A22B-FP8 nvidia--Qwen3-235B-A22B-NVFP4 "
        "Qwen--Qwen3-VL-235B-A22B-Instruct",
        Held(94 * kv(4, 128)),
    ),
    ("Qwen--Qwen3-Coder-480B-A35B-Instruct", Held(62 * kv(8, 128))),
    ("phi-4", Held(40 * kv(10, 128))),
    ("infsim--mistral-nemo-instruct-2407", Held(40 * kv(8, 128))),
    (
        "sophgo--Mistral-7B-Instruct-v0.2 mistralai--Mixtral-8x7B-v0.1 infsim--mixtral-8x7b-v0.1",
        Held(32 * kv(8, 128)),
    ),
    ("mistralai--Mixtral-8x22B-v0.1", Held(56 * kv(8, 128))),
    ("Devstral-2-123B-Instruct", Held(88 * kv(8, 128))),
    ("databricks--dbrx-16x13b", Held(40 * kv(8, 128))),
    ("tencent--Hunyuan-A13B", Held(32 * kv(8, 128))),
    ("XiaomiMiMo--MiMo-7B-Base", Held(36 * kv(8, 128))),
    ("zai-org--GLM-4.5", Held(92 * kv(8, 128))),
    (
        "MiniMaxAI--MiniMax-M2.5 MiniMaxAI--MiniMax-M2.7 nvidia--MiniMax-M2.5-NVFP4 nvidia--MiniMax-M2.7-NVFP4",
        Held(62 * kv(8, 128)),
    ),
    ("sophgo--GLM-4.1V-9B sophgo--glm-4-9b-chat", Held(40 * kv(2, 128))),
    ("sophgo--chatglm2-6b sophgo--chatglm3-6b sophgo--chatglm3-6b-32k", Held(28 * kv(2, 128))),
    ("sophgo--MiniCPM-V-4 sophgo--MiniCPM4", Held(32 * kv(2, 128))),
    ("sophgo--vila1.5-3b", Held(32 * kv(20, 128))),
    ("sophgo--Baichuan2-7B mosaicml--mpt-7b", Held(32 * kv(32, 128))),
    ("tiiuae--falcon-40b", Held(60 * kv(8, 64))),
    ("gpt2-1p5B", Held(48 * kv(25, 64))),
    ("sophgo--WizardCoder-15B-V1.0", Held(40 * kv(1, 128))),
    # 49 of the 80 layers have kept their attention, of 64 query heads in groups of 8.
    ("nvidia--Llama-3_3-Nemotron-Super-49B-v1", Held(49 * kv(8, 128))),
    # Every head is unfolded, V padded to the width of K: 64 plain and 32 rotary elements.
    ("sophgo--MiniCPM3-4B", Held(62 * kv(40, 64 + 32))),
    # --- sliding and full
    ("openai--gpt-oss-20b", Held(12 * kv(8, 64), last=((128, 12 * kv(8, 64)),))),
    ("openai--gpt-oss-120b", Held(18 * kv(8, 64), last=((128, 18 * kv(8, 64)),))),
    ("sophgo--gemma-3-4b-it", Held(5 * kv(4, 256), last=((1024, 29 * kv(4, 256)),))),
    ("google--gemma-3-27b-it", Held(10 * kv(16, 128), last=((1024, 52 * kv(16, 128)),))),
    (
        "Olmo-3.1-32B-Instruct EXAONE-4.0-32B EXAONE-4.5-33B",
        Held(16 * kv(8, 128), last=((4096, 48 * kv(8, 128)),)),
    ),
    ("microsoft--Phi-mini-MoE-instruct", Held(last=((2047, 32 * kv(8, 128)),))),
    (
        "stepfun-ai--Step-3.7-Flash stepfun-ai--Step-3.7-Flash-FP8",
        Held(12 * kv(8, 128), last=((512, 33 * kv(8, 128)),)),
    ),
    # K heads of 192 and V heads of 128: 4 of each in a full layer, 8 in a sliding one.
    ("XiaomiMiMo--MiMo-V2-Flash", Held(9 * 2 * 4 * (192 + 128), last=((128, 39 * 2 * 8 * (192 + 128)),))),
    # Every fourth layer sees everything, the others their own chunk.
    (
        "meta-llama--Llama-4-Scout-17B-16E-Instruct meta-llama--Llama-4-Maverick-17B-128E-Instruct "
        "infsim--llama-4-scout-17b-16e-instruct-fp8-dynamic",
        Held(12 * kv(8, 128), last=((8192, 36 * kv(8, 128)),)),
    ),
    # Full layers have fewer and wider heads.
    (
        "google--gemma-4-26B-A4B nvidia--Gemma-4-26B-A4B-NVFP4",
        Held(5 * kv(2, 512), last=((1024, 25 * kv(8, 256)),)),
    ),
    ("nvidia--Gemma-4-31B-IT-NVFP4", Held(10 * kv(4, 512), last=((1024, 50 * kv(16, 256)),))),
    # Of 35 layers the last 20 read the caches of earlier ones. Of the first 15 every fifth is full.
    ("sophgo--gemma-4-E2B", Held(3 * kv(1, 512), last=((512, 12 * kv(1, 256)),))),
    # --- an image, or none
    ("sophgo--Llama-3.2-11B-Vision mllama-11b-text32", Held(32 * kv(8, 128), once=8 * TILED_IMAGE * kv(8, 128))),
    # --- latent
    ("infsim--deepseek-v2-lite", Held(27 * LATENT)),
    (
        "deepseek-ai--DeepSeek-V3 deepseek-ai--DeepSeek-R1 nvidia--DeepSeek-V3.1-NVFP4 moonshotai--Kimi-K2-Instruct "
        "moonshotai--Kimi-K2-Instruct_rtp moonshotai--Kimi-K2.5 nvidia--Kimi-K2.5-NVFP4 nvidia--Kimi-K2.6-NVFP4 "
        "nvidia--Kimi-K2.7-Code-NVFP4",
        Held(61 * LATENT),
    ),
    ("deepseek-ai--DeepSeek-V3.2 nvidia--DeepSeek-V3.2-NVFP4", Held(61 * (LATENT + INDEX_KEY))),
    (
        "zai-org--GLM-5-FP8 nvidia--GLM-5-NVFP4 zai-org--GLM-5.1 zai-org--GLM-5.1-FP8 nvidia--GLM-5.1-NVFP4 "
        "infsim--glm-5.2-fp8",
        Held(78 * (LATENT + INDEX_KEY)),
    ),
    # 57 of the 78 layers use what an earlier layer's index has chosen. (The file above leaves that out.)
    ("zai-org--GLM-5.2 zai-org--GLM-5.2-FP8 nvidia--GLM-5.2-NVFP4", Held(78 * LATENT + 21 * INDEX_KEY)),
    (
        "deepseek-ai--DeepSeek-V4-Flash nvidia--DeepSeek-V4-Flash-NVFP4 sgl-project--DeepSeek-V4-Flash-FP8",
        deepseek_v4(window_only=2, by_4=21, by_128=20),
    ),
    (
        "deepseek-ai--DeepSeek-V4-Pro nvidia--DeepSeek-V4-Pro-NVFP4 sgl-project--DeepSeek-V4-Pro-FP8",
        deepseek_v4(window_only=0, by_4=30, by_128=31),
    ),
    # 57 of the 60 layers are sparse, and index their blocks with keys of 128 in BF16.
    ("MiniMaxAI--MiniMax-M3 nvidia--MiniMax-M3-NVFP4", Held(60 * kv(4, 128) + 57 * 2 * 128)),
    # --- recurrent
    ("sophgo--Qwen3.5-0.8B-class", Held(6 * kv(2, 256), once=18 * delta_net(16, 16))),
    # The same text model. Its state stays in BF16: vLLM looks up the wish for float32 under Qwen3.5's name alone.
    ("sophgo--MiniCPM-V-4_6", Held(6 * kv(2, 256), once=18 * delta_net(16, 16, state_bytes=2))),
    ("Qwen3.5-9B", Held(8 * kv(4, 256), once=24 * delta_net(16, 32))),
    ("Qwen--Qwen3.5-27B nvidia--Qwen3.6-27B-NVFP4", Held(16 * kv(4, 256), once=48 * delta_net(16, 48))),
    ("Qwen--Qwen3.5-35B-A3B nvidia--Qwen3.6-35B-A3B-NVFP4", Held(10 * kv(2, 256), once=30 * delta_net(16, 32))),
    ("Qwen--Qwen3.5-122B-A10B nvidia--Qwen3.5-122B-A10B-NVFP4", Held(12 * kv(2, 256), once=36 * delta_net(16, 64))),
    ("Qwen--Qwen3.5-397B-A17B nvidia--Qwen3.5-397B-A17B-NVFP4", Held(15 * kv(2, 256), once=45 * delta_net(16, 64))),
    (
        "nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16 nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-NVFP4 "
        "nvidia--NVIDIA-Nemotron-3.5-Lightning-30B-A3B-NVFP4",
        Held(6 * kv(2, 128), once=23 * mamba2(64, 128)),
    ),
    (
        "nvidia--NVIDIA-Nemotron-3-Super-120B-A12B-FP8 nvidia--NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4",
        Held(8 * kv(2, 128), once=40 * mamba2(128, 128)),
    ),
    ("nvidia--NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16", Held(12 * kv(2, 128), once=48 * mamba2(256, 128))),
    ("nvidia--Nemotron-H-56B-Base-8K", Held(10 * kv(8, 128), once=54 * mamba2(256, 256))),
    ("LFM2.5-VL-1.6B", Held(6 * kv(8, 64), once=10 * LFM2_CONV)),
    ("moonshotai--Kimi-K3", Held(24 * LATENT, once=69 * KDA)),
)
