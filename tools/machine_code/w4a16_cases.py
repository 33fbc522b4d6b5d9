"""Registered launches of the Hopper kernels for 4-bit weights and bf16 tokens: plain data."""

from dataclasses import dataclass

PREFIX = "w4a16-"
FEW, MANY = PREFIX + "few-", PREFIX + "many-"


@dataclass(frozen=True)
class W4A16Case:
    """One launch of the layer of gpt-oss-20b (2880/2880, 32 experts, top-4, biases) for so many tokens.

    launch: "permute", "l1", "l2" or "sum" of the kernels for few tokens; or "many-l1", "many-l2", "many-sent", which
    is L2 whose rows go to other places.
    """

    name: str
    launch: str
    num_tokens: int

    @property
    def title(self) -> str:
        """Name in the registry."""
        return PREFIX + self.name


W4A16_CASES = (
    W4A16Case("permute", "permute", 16),
    W4A16Case("few-l1-ids", "l1", 1),
    W4A16Case("few-l1", "l1", 16),
    W4A16Case("few-l2", "l2", 16),
    W4A16Case("few-l1-wide", "l1", 64),
    W4A16Case("few-l2-wide", "l2", 64),
    W4A16Case("sum", "sum", 16),
    W4A16Case("many-l1-64", "many-l1", 256),
    W4A16Case("many-l1-128", "many-l1", 512),
    W4A16Case("many-l1", "many-l1", 4096),
    W4A16Case("many-l2", "many-l2", 4096),
    W4A16Case("many-sent", "many-sent", 4096),
)
