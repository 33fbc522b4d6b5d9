"""Practical calls of the router, whose kernels are compiled, counted and run on a GPU.

Plain data, so that listing them is quick; `router_recipes` turns a case into a recipe.
"""

from dataclasses import dataclass

PREFIX = "router-"


@dataclass(frozen=True)
class RouterCase:
    """Call of `envoi.route`: tokens [M, hidden], gate [N, hidden].

    rule: a model's name, or "softmax". kernel: "sm90" or "triton". hashed: experts are looked up.
    everything: return all extra outputs.
    """

    name: str
    M: int
    N: int
    hidden: int
    k: int
    rule: str
    dtype: str = "bf16"
    kernel: str = "sm90"
    hashed: bool = False
    everything: bool = False

    @property
    def title(self) -> str:
        """Name in the registry."""
        return f"{PREFIX}{self.kernel}-{self.name}" if self.name else f"{PREFIX}{self.kernel}"

    @property
    def arches(self) -> tuple[str, ...]:
        """Architectures to compile for."""
        return ("sm_90",) if self.kernel == "sm90" else ("sm_90", "sm_100", "sm_103")

    def __str__(self) -> str:
        rest = ", looked up" * self.hashed + ", all outputs" * self.everything
        return f"top {self.k} of {self.N} experts by {self.rule}, [{self.M}, {self.hidden}] in {self.dtype}{rest}"


ROUTER_CASES = (
    RouterCase("few-experts", 512, 8, 128, 4, "softmax", "fp16"),
    RouterCase("one-token", 1, 256, 7168, 8, "deepseek-v3"),
    RouterCase("decode", 128, 256, 7168, 8, "deepseek-v3"),
    RouterCase("decode-ungrouped", 16, 384, 7168, 8, "kimi-k2"),
    RouterCase("two-roles", 4096, 128, 2048, 4, "softmax", "fp16"),
    RouterCase("prefill", 16384, 256, 7168, 8, "deepseek-v3"),
    RouterCase("many-experts", 2048, 512, 4096, 10, "softmax"),
    RouterCase("everything", 4096, 256, 7168, 8, "deepseek-v3", everything=True),
    RouterCase("hashed", 64, 256, 4096, 6, "deepseek-v4-flash", hashed=True),
    RouterCase("", 4096, 256, 7168, 8, "deepseek-v3", kernel="triton"),
    RouterCase("fp32", 4096, 256, 7168, 8, "deepseek-v3", "fp32", kernel="triton"),
    RouterCase("few-experts", 512, 8, 128, 4, "softmax", "fp16", kernel="triton"),
)  # fmt: skip
