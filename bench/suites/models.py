"""Sizes of published models: what the suites that draw choose from.

Each row is of the model's published config.json, which `source` names.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention: heads of queries, heads of keys and values, size of a head."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class LatentAttention:
    """Attention with latents: ranks of queries and of keys and values, sizes of a head's parts."""

    num_heads: int
    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int


@dataclass(frozen=True)
class Model:
    """Sizes of a model. source: the checkpoint whose config.json has them.

    intermediate: of the dense layers' MLP, 0 if there are none. shared: intermediate size of all shared experts
    together. num_experts, num_topk, expert_intermediate: 0 without experts. preset: its name in
    `envoi.ops.moe.router.PRESETS`. attention: None where its matrices are of other kinds than these two.
    """

    name: str
    source: str
    hidden: int
    intermediate: int = 0
    attention: Attention | LatentAttention | None = None
    num_experts: int = 0
    num_topk: int = 0
    expert_intermediate: int = 0
    shared: int = 0
    preset: str = ""


_GPT_OSS = Attention(64, 8, 64)

MODELS = (
    Model("Llama-2-7B", "meta-llama/Llama-2-7b-hf", 4096, 11008, Attention(32, 32, 128)),
    Model("Llama-3.1-8B", "meta-llama/Llama-3.1-8B", 4096, 14336, Attention(32, 8, 128)),
    Model("Llama-3.1-70B", "meta-llama/Llama-3.1-70B", 8192, 28672, Attention(64, 8, 128)),
    Model("Gemma-2-2B", "google/gemma-2-2b", 2304, 9216, Attention(8, 4, 256)),
    Model("Mixtral-8x7B", "mistralai/Mixtral-8x7B-v0.1", 4096, 0, Attention(32, 8, 128), 8, 2, 14336, 0, "mixtral"),
    Model("Phi-3.5-MoE", "microsoft/Phi-3.5-MoE-instruct", 4096, 0, Attention(32, 8, 128), 16, 2, 6400),
    Model("Qwen1.5-MoE-A2.7B", "Qwen/Qwen1.5-MoE-A2.7B", 2048, 0, Attention(16, 16, 128), 60, 4, 1408, 5632),
    Model("Qwen3-30B-A3B", "Qwen/Qwen3-30B-A3B", 2048, 0, Attention(32, 4, 128), 128, 8, 768, 0, "qwen3-moe"),
    Model("Qwen3-235B-A22B", "Qwen/Qwen3-235B-A22B", 4096, 0, Attention(64, 4, 128), 128, 8, 1536, 0, "qwen3-moe"),
    Model(
        "Qwen3-Coder-480B-A35B", "Qwen/Qwen3-Coder-480B-A35B-Instruct", 6144, 0, Attention(96, 8, 128), 160, 8, 2560, 0,
        "qwen3-coder-480b",
    ),
    Model("Qwen3-Next-80B-A3B", "Qwen/Qwen3-Next-80B-A3B-Instruct", 2048, 0, None, 512, 10, 512, 512, "qwen3-next"),
    Model("gpt-oss-20b", "openai/gpt-oss-20b", 2880, 0, _GPT_OSS, 32, 4, 2880, 0, "gpt-oss-20b"),
    Model("gpt-oss-120b", "openai/gpt-oss-120b", 2880, 0, _GPT_OSS, 128, 4, 2880, 0, "gpt-oss-120b"),
    Model(
        "Llama-4-Scout", "meta-llama/Llama-4-Scout-17B-16E", 5120, 0, Attention(40, 8, 128), 16, 1, 8192, 8192,
        "llama4-scout",
    ),
    Model(
        "DeepSeek-V2", "deepseek-ai/DeepSeek-V2", 5120, 12288, LatentAttention(128, 1536, 512, 128, 64, 128), 160, 6,
        1536, 3072, "deepseek-v2",
    ),
    Model(
        "DeepSeek-V3", "deepseek-ai/DeepSeek-V3", 7168, 18432, LatentAttention(128, 1536, 512, 128, 64, 128), 256, 8,
        2048, 2048, "deepseek-v3",
    ),
    Model(
        "DeepSeek-V4-Flash", "deepseek-ai/DeepSeek-V4-Flash-Base", 4096, 0, None, 256, 6, 2048, 2048,
        "deepseek-v4-flash",
    ),
    Model(
        "Kimi-K2", "moonshotai/Kimi-K2-Instruct", 7168, 18432, LatentAttention(64, 1536, 512, 128, 64, 128), 384, 8,
        2048, 2048, "kimi-k2",
    ),
    Model(
        "GLM-5", "zai-org/GLM-5", 6144, 12288, LatentAttention(64, 2048, 512, 192, 64, 256), 256, 8, 2048, 2048, "glm-5"
    ),
    Model("MiniMax-M2", "MiniMaxAI/MiniMax-M2", 3072, 0, Attention(48, 8, 128), 256, 8, 1536, 0, "minimax-m2"),
)  # fmt: skip


@dataclass(frozen=True)
class Linear:
    """Linear layer of a model: y [M, n] = x [M, k] @ w.T. role: "gate_up" has gate and up columns, others haven't."""

    role: str
    n: int
    k: int


def linears(model: Model) -> list[Linear]:
    """Return the linear layers that every token goes through, without the routed experts and the vocabulary's."""
    found = _attention(model)
    for size, suffix in ((model.intermediate, ""), (model.shared, "_shared")):
        if size:
            found.append(Linear(f"gate_up{suffix}", 2 * size, model.hidden))
            found.append(Linear(f"down{suffix}", model.hidden, size))
    return found


def _attention(model: Model) -> list[Linear]:
    part, hidden = model.attention, model.hidden
    if isinstance(part, Attention):
        return [
            Linear("qkv", (part.num_heads + 2 * part.num_kv_heads) * part.head_dim, hidden),
            Linear("o", hidden, part.num_heads * part.head_dim),
        ]
    if isinstance(part, LatentAttention):
        return [
            Linear("q_a_kv_a", part.q_rank + part.kv_rank + part.rope_dim, hidden),
            Linear("q_b", part.num_heads * (part.nope_dim + part.rope_dim), part.q_rank),
            Linear("kv_b", part.num_heads * (part.nope_dim + part.v_dim), part.kv_rank),
            Linear("o", hidden, part.num_heads * part.v_dim),
        ]
    return []
