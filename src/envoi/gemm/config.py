"""How a GEMM kernel cuts its work: one frozen Config, and one predicate that says whether it works here."""

from dataclasses import dataclass

SHARED_BYTES = {90: 232448 - 1024, 100: 232448 - 1024, 103: 232448 - 1024}
BARRIER_BYTES = 512
MIN_STAGES = 2


@dataclass(frozen=True)
class Config:
    """The mainloop of one GEMM on sm_90.

    The instruction's M side is `x`, its N side `y`: tokens and features, or the other way round with `swap_ab`.
    role_m: rows of x a consumer role, 64 or 128. num_roles: consumer roles of four warps that share the tile of y.
    block_y: columns of a tile. block_k: elements of K a stage. num_stages: stages in flight.
    split_k: pieces along K of the tiles that don't fill a wave; 1 = none.
    group: rows of tiles that are walked together, so that both operands stay in the L2.
    piece: accumulator columns that leave at a time.
    turns: buffers that pieces leave through in turns.
    per_sm: CTAs on one multiprocessor; with 2, the epilogue of one overlaps the products of the other.
    """

    role_m: int
    num_roles: int
    block_y: int
    block_k: int
    num_stages: int
    num_warps: int = 4
    pingpong: bool = False
    split_k: int = 1
    swap_ab: bool = False
    group: int = 8
    piece: int = 64
    turns: int = 2
    per_sm: int = 1

    @property
    def block_x(self) -> int:
        """Rows of a tile."""
        return self.role_m * self.num_parts

    @property
    def num_parts(self) -> int:
        """Roles that work on the same tile."""
        return 1 if self.pingpong else self.num_roles

    @property
    def num_pieces(self) -> int:
        """Pieces of a role's tile."""
        return max(1, (self.role_m if self.swap_ab else self.block_y) // self.piece)

    def __str__(self) -> str:
        pingpong = " pp" if self.pingpong else ""
        swap = " swap" if self.swap_ab else ""
        split = f" split{self.split_k}" if self.split_k > 1 else ""
        return f"{self.num_roles}x{self.role_m}x{self.block_y} w{self.num_warps}{pingpong} k{self.block_k} s{self.num_stages} p{self.piece}x{self.turns} c{self.per_sm}{swap}{split}"


def shared_bytes(config: Config, element_bytes: int, leaving_bytes: int) -> int:
    """Shared memory of a config. leaving_bytes: of the staging buffers, for each row of a piece."""
    stage = (config.block_x + config.block_y) * config.block_k * element_bytes
    return config.num_stages * stage + config.block_x * leaving_bytes + BARRIER_BYTES
