"""Practical calls of the Hopper GEMM, whose kernels are compiled, counted and run on a GPU.

Plain data, so that listing them is quick; `hopper_recipes` turns a case into inputs and recipes.
"""

from dataclasses import dataclass

PREFIX = "gemm-sm90-"


@dataclass(frozen=True)
class Case:
    """Call of `envoi.gemm`, or of `envoi.grouped_gemm` if there are experts: [M, K] @ [N, K].T.

    epilogue: a key of `hopper_recipes.EPILOGUES`. format: bf16, fp16, fp8_row or fp8_block128. M: sum over all experts.
    write_tail: see `Grouping`; `envoi.moe` has it off. sent: rows are written to given addresses.
    """

    name: str
    epilogue: str
    M: int
    N: int
    K: int
    format: str = "bf16"
    num_experts: int = 0
    write_tail: bool = True
    sent: bool = False

    @property
    def title(self) -> str:
        """Name in the registry."""
        return PREFIX + self.name

    def __str__(self) -> str:
        sizes = f"{self.epilogue} of [{self.M}, {self.K}] @ [{self.N}, {self.K}].T in {self.format}"
        return f"{sizes}, {self.num_experts} experts" if self.num_experts else sizes


CASES = (
    Case("store", "store", 4096, 4096, 7168),
    Case("store-fp16", "store", 4096, 4096, 7168, "fp16"),
    Case("odd", "store", 129, 130, 72),
    Case("scale-bias-relu", "scale_bias_relu", 4096, 4096, 2048),
    Case("gelu-residual", "gelu_residual", 4096, 4096, 2048),
    Case("absmax", "absmax", 4096, 4096, 2048),
    Case("swiglu", "swiglu", 4096, 4096, 7168),
    Case("swiglu-residual", "swiglu_residual", 4096, 4096, 2048),
    Case("swiglu-fp8", "swiglu_fp8", 4096, 4096, 7168),
    Case("softmax-64", "softmax", 4096, 64, 2880),
    Case("softmax-128", "softmax", 4096, 128, 2880),
    Case("topk-64", "topk", 4096, 64, 2880),
    Case("topk-128", "topk", 4096, 128, 2880),
    Case("few", "store", 16, 7168, 2048),
    Case("few-swiglu", "swiglu", 32, 4096, 2048),
    Case("split", "store", 8192, 4096, 7168),
    Case("split-linear", "linear", 8192, 8192, 8192),
    Case("split-narrow", "store", 256, 256, 7168),
    Case("fp8-row", "store", 4096, 4096, 7168, "fp8_row"),
    Case("fp8-row-few", "store", 16, 4096, 7168, "fp8_row"),
    Case("fp8-row-swiglu-fp8", "swiglu_fp8", 4096, 4096, 7168, "fp8_row"),
    Case("fp8-block128", "store", 4096, 4096, 7168, "fp8_block128"),
    Case("fp8-block128-few", "store", 16, 4096, 7168, "fp8_block128"),
    Case("fp8-block128-swiglu", "swiglu", 4096, 4096, 7168, "fp8_block128"),
    Case("grouped", "store", 8192, 2880, 2880, num_experts=32),
    Case("grouped-few", "store", 512, 2880, 2880, num_experts=32),
    Case("grouped-l1-mxfp8", "expert_l1_mxfp8", 8192, 5760, 2880, num_experts=32),
    Case("grouped-fp8-row", "expert_l1_fp8", 8192, 4096, 7168, "fp8_row", num_experts=32),
    Case("grouped-fp8-block128", "expert_l1_mxfp8", 8192, 4096, 7168, "fp8_block128", num_experts=32),
    Case("experts-l1", "expert_l1", 12288, 4096, 4096, num_experts=32, write_tail=False),
    Case("experts-l1-few", "expert_l1", 384, 4096, 4096, num_experts=32, write_tail=False),
    Case("experts-l1-oai", "expert_l1_oai", 8192, 5760, 2880, num_experts=32, write_tail=False),
    Case("experts-l1-fp8-row", "expert_l1", 12288, 4096, 4096, "fp8_row", num_experts=32, write_tail=False),
    Case("experts-l1-fp8-block128", "expert_l1", 12288, 4096, 4096, "fp8_block128", num_experts=32, write_tail=False),
    Case("experts-l1-concat", "expert_l1_concat", 12288, 4096, 4096, num_experts=32, write_tail=False),
    Case("experts-l1-concat-few", "expert_l1_concat", 384, 4096, 4096, num_experts=32, write_tail=False),
    Case("experts-l1-concat-oai", "expert_l1_oai_concat", 8192, 5760, 2880, num_experts=32, write_tail=False),
    Case("experts-l1-concat-fp8-row", "expert_l1_concat", 12288, 4096, 4096, "fp8_row", 32, write_tail=False),
    Case("experts-l1-concat-fp8-block128", "expert_l1_concat", 12288, 4096, 4096, "fp8_block128", 32, write_tail=False),
    Case("experts-l1-concat-fp8-block128-few", "expert_l1_concat", 384, 4096, 4096, "fp8_block128", 32, False),
    Case("experts-l2", "expert_l2", 12288, 4096, 2048, num_experts=32, write_tail=False),
    Case("experts-l2-few", "expert_l2", 384, 4096, 2048, num_experts=32, write_tail=False),
    Case("experts-l2-sent", "expert_l2", 12288, 4096, 2048, num_experts=64, write_tail=False, sent=True),
    Case("experts-l2-sent-fp8-block128", "expert_l2", 12288, 4096, 2048, "fp8_block128", 64, False, True),
    Case("experts-l2-sent-fp8-row", "expert_l2", 12288, 4096, 2048, "fp8_row", 64, write_tail=False, sent=True),
    Case("experts-l2-sent-few", "expert_l2", 384, 4096, 2048, "fp8_block128", 64, write_tail=False, sent=True),
    Case("experts-l2-bias", "expert_l2_bias", 8192, 2880, 2880, num_experts=32, write_tail=False),
    Case("experts-l2-fp8-row", "expert_l2", 12288, 4096, 2048, "fp8_row", num_experts=32, write_tail=False),
    Case("experts-l2-fp8-block128", "expert_l2", 12288, 4096, 2048, "fp8_block128", num_experts=32, write_tail=False),
)
