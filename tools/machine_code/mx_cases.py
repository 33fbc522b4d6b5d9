"""Practical calls of the Hopper GEMM for MX weights. Plain data; `mx_recipes` turns a case into a recipe."""

from dataclasses import dataclass

PREFIX = "gemm-mx-sm90-"


@dataclass(frozen=True)
class MxCase:
    """Call of `envoi.gemm`, or of `envoi.grouped_gemm` if there are experts: [M, K] @ [N, K].T.

    epilogue: a key of `hopper_recipes.EPILOGUES`. format: a key of `envoi.quant.FORMATS`, with MX weights. M: sum over
    all experts. tame: see QuantTensor.
    """

    name: str
    epilogue: str
    M: int
    N: int
    K: int
    format: str
    num_experts: int = 0
    tame: bool = True

    @property
    def title(self) -> str:
        """Name in the registry."""
        return PREFIX + self.name

    def __str__(self) -> str:
        kind = f"{self.format}{'' if self.tame else ', not known to be tame'}"
        sizes = f"{self.epilogue} of [{self.M}, {self.K}] @ [{self.N}, {self.K}].T in {kind}"
        return f"{sizes}, {self.num_experts} experts" if self.num_experts else sizes


MX_CASES = tuple(
    case
    for name, format in (("mxfp4", "mxfp4_mxfp8"), ("mxfp8", "mxfp8"))
    for case in (
        MxCase(f"{name}-few", "store", 512, 4096, 4096, format, 32),
        MxCase(f"{name}-few-wild", "store", 512, 4096, 4096, format, 32, tame=False),
        MxCase(f"{name}-64", "store", 2048, 4096, 4096, format, 32),
        MxCase(f"{name}-many", "expert_l1_mxfp8", 12288, 4096, 4096, format, 32),
        MxCase(f"{name}-many-wild", "store", 12288, 4096, 2048, format, 32, tame=False),
        MxCase(f"{name}-plain", "swiglu", 16, 4096, 2048, format),
    )
)
