"""Small random models of transformers, in bf16."""

import copy

import torch
import transformers

COMMON = {
    "vocab_size": 64, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MLA = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32}
MODELS = {
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": ("Qwen3MoeConfig", {"num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 128,
                                     "head_dim": 32, "norm_topk_prob": True}),
    "olmoe": ("OlmoeConfig", {"num_experts": 8, "num_experts_per_tok": 4}),
    "deepseek_v3": ("DeepseekV3Config", {**MLA, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2,
                                         "topk_group": 1, "moe_intermediate_size": 128, "first_k_dense_replace": 1,
                                         "n_shared_experts": 1, "num_key_value_heads": 4}),
    "glm4_moe": ("Glm4MoeConfig", {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
                                   "first_k_dense_replace": 1, "n_shared_experts": 1, "head_dim": 32}),
    "gpt_oss": ("GptOssConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "hidden_size": 160, "head_dim": 32,
                                 "intermediate_size": 96}),
}  # fmt: skip


def build(name: str, **more) -> transformers.PreTrainedModel:
    """Return a random model in bf16 whose routers and biases differ between layers and experts; more: of its config."""
    config_name, own = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, config_name)(**{**COMMON, **own, **more})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, experts_implementation="eager")
    with torch.no_grad():
        for label, tensor in model.named_parameters():
            if tensor.dim() >= 2 or "bias" in label:
                tensor.normal_(std=0.05 if tensor.dim() >= 3 else 0.1)
    return model.eval()


def loud(name: str) -> transformers.PreTrainedModel:
    """Return `build(name)` through Envoi, with experts large enough to dominate the logits."""
    model = build(name)
    with torch.no_grad():
        for tensor in expert_weights(model):
            tensor.mul_(8)
    model.set_experts_implementation("envoi")
    return model


def expert_modules(model: torch.nn.Module) -> list:
    """Return the experts module of each layer that has one."""
    return [module for module in model.modules() if hasattr(module, "gate_up_proj") and hasattr(module, "has_gate")]


def expert_weights(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return gate_up_proj and down_proj of each layer that has experts."""
    return [weight for module in expert_modules(model) for weight in (module.gate_up_proj, module.down_proj)]


def logits(model, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, use_cache=False).logits


def fresh_logits(model, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits of a copy of the model that has nothing packed or compiled yet."""
    return logits(copy.deepcopy(model), ids)


def tokens(batch: int = 2, length: int = 12, seed: int = 1) -> torch.Tensor:
    """Return random ids [batch, length] without special tokens."""
    return torch.randint(3, 64, (batch, length), generator=torch.Generator().manual_seed(seed))
