"""How a GEMM kernel cuts its work on Hopper: one frozen Config, one predicate, one model of its time."""

from dataclasses import dataclass, replace
from math import ceil, erfc, exp, sqrt

from envoi.epilogue.lower import Lowered
from envoi.runtime.devices import SHARED_BYTES
from envoi.runtime.math import next_power_of_2

RESERVED_BYTES = 2048  # barriers, and what reductions exchange
MIN_STAGES = 2


@dataclass(frozen=True)
class Config:
    """The mainloop of one GEMM on sm_90.

    The instruction's M side is `x`, its N side `y`: tokens and features, or the other way round with `swap_ab`.
    role_m: rows of x a consumer role, 64 or 128. num_roles: consumer roles that share the tile of y, each with its own
        rows of x; with `pingpong` they take turns at whole tiles instead, and the epilogue of one overlaps the products
        of the other.
    block_y: columns of a tile. block_k: elements of K a stage. num_stages: stages in flight.
    num_warps: warps of a consumer role, 4 or 8.
    split_k: parts along K of the tiles that don't fill a wave; 1 = none.
    group: rows of tiles that are walked together, so that both operands stay in the L2.
    piece: accumulator columns that leave at a time. turns: buffers that pieces leave through in turns.
    wide_last: in a grouped GEMM the last role_m rows of an expert, or fewer, are covered by tiles of role_m x 2 block_y
        whose roles share the rows, each with its own columns. A tile takes the same time wherever it lies.
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
    turns: int = 1
    wide_last: bool = False

    @property
    def block_x(self) -> int:
        """Rows of a tile."""
        return self.role_m * self.num_parts

    @property
    def num_parts(self) -> int:
        """Roles that work on the same tile."""
        return 1 if self.pingpong else self.num_roles

    @property
    def spread_experts(self) -> bool:
        """Vectors over the experts are spread over a role's warps: no, each warp has all."""
        return False

    @property
    def block_m(self) -> int:
        """Tokens of a tile, or of the lowest."""
        return self.role_m if self.wide_last else self.block_y if self.swap_ab else self.block_x

    @property
    def block_n(self) -> int:
        """Features of a tile, or of the widest."""
        return self.block_x if self.swap_ab else self.block_y * self.num_sides

    @property
    def num_buffers(self) -> int:
        """Buffers of role_m rows of x; with `wide_last` the first of them are those of y, two for one."""
        return -(-5 * self.num_stages // 2) * 2 if self.wide_last else self.num_stages * self.num_parts

    @property
    def num_sides(self) -> int:
        """Shares of y that a stage has room for."""
        return 2 if self.wide_last else 1

    @property
    def num_pieces(self) -> int:
        """Pieces of a role's tile."""
        return max(1, (self.role_m if self.swap_ab else self.block_y) // self.piece)

    def __str__(self) -> str:
        """All that kernels differ by: the compiler's cache files them under it."""
        parts = [
            f"{self.num_roles}x{self.role_m}x{self.block_y}",
            f"k{self.block_k}x{self.num_stages}",
            f"p{self.piece}x{self.turns}",
        ]
        parts += [f"w{self.num_warps}"] * (self.num_warps != 4) + [f"split{self.split_k}"] * (self.split_k > 1)
        parts += [f"group{self.group}"] * (self.group != 8)
        return " ".join(parts + [name for name in ("pingpong", "swap_ab", "wide_last") if getattr(self, name)])


@dataclass(frozen=True)
class Problem:
    """What is to be computed: tokens M, features N, K, bytes of an element.

    num_groups: experts of a grouped GEMM, 0 for a plain one. scaled: factors change along K (fp8_block128).
    side_bytes: of tile operands that come by TMA, for each column of the accumulator.
    """

    M: int
    N: int
    K: int
    element_bytes: int
    num_groups: int = 0
    scaled: bool = False
    side_bytes: float = 0.0


def supports(problem: Problem, config: Config, code: Lowered) -> str:
    """Why a config can't run this problem with this epilogue, in words; "" if it can."""
    width = config.role_m if config.swap_ab else config.block_y
    if config.num_stages < MIN_STAGES:
        return f"num_stages: expected at least {MIN_STAGES}, got {config.num_stages}: the producer would wait forever"
    if config.role_m not in (64, 128) or config.num_roles not in (1, 2) or config.num_warps not in (4, 8):
        return f"roles: expected 1 or 2 of 64 or 128 rows by 4 or 8 warps, got {config}"
    if config.role_m < 16 * config.num_warps:
        return f"role_m: expected at least 16 rows a warp, got {config.role_m} rows for {config.num_warps} warps"
    if config.block_y & (config.block_y - 1) or not 8 <= config.block_y <= 256:
        return f"block_y: expected a power of two from 8 to 256, got {config.block_y}"
    if config.pingpong and config.num_roles != 2:
        return f"pingpong: expected 2 roles, got {config.num_roles}"
    if width % min(config.piece, width) or min(config.piece, width) % code.piece_columns:
        return f"piece: expected a multiple of {code.piece_columns} columns that divides {width}, got {config.piece}"
    if code.whole and (config.swap_ab or config.block_y < problem.N or config.piece < config.block_y):
        return f"block_y: expected pieces of whole rows of {problem.N} columns, got {config.piece}"
    if config.swap_ab and (code.leaving or code.side):
        return "swap_ab: expected an epilogue lowered to plain loads and stores"
    if config.split_k > 1 and config.piece * config.role_m > 128 * 64 and not config.swap_ab:
        return f"split_k: expected pieces of at most 128 columns, got {config.piece}: the parts' sums wouldn't fit"
    if problem.num_groups and config.split_k > 1:
        return f"split_k: expected 1 in a grouped GEMM, got {config.split_k}"
    if config.wide_last and (problem.N % config.block_n or not problem.num_groups):
        return f"wide_last: expected a grouped GEMM with N a multiple of {config.block_n}, got {problem.N}"
    if config.wide_last and (config.num_parts != 2 or config.block_y != 2 * config.role_m or config.swap_ab):
        return f"wide_last: expected a tile of two roles that is as wide as high, got {config}"
    if problem.scaled and config.block_k not in (128, 256):
        return f"block_k: expected 128 or 256 (one block or two) with factors along K, got {config.block_k}"
    if problem.scaled and config.role_m * config.block_y > 64 * 128 * config.num_warps // 4:
        return f"block_y: expected at most 64 x 128 a role with factors along K, got {config.role_m} x {config.block_y}"
    if accumulator_registers(config) > 128:
        return f"block_y: expected at most 128 accumulators a thread, got {accumulator_registers(config)}"
    used = shared_bytes(problem, config, code)
    return (
        "" if used <= SHARED_BYTES else f"num_stages: {config} needs {used} bytes of shared memory, got {SHARED_BYTES}"
    )


def accumulator_registers(config: Config) -> int:
    """Accumulators that a thread of a consumer holds."""
    return config.role_m * config.block_y // (32 * config.num_warps)


def shared_bytes(problem: Problem, config: Config, code: Lowered) -> int:
    """Shared memory of a config: the stages, the buffers of what leaves and of tile operands."""
    stage_rows = config.num_buffers * config.role_m + (not config.wide_last) * config.num_stages * config.block_y
    stages = stage_rows * config.block_k * problem.element_bytes
    rows = config.role_m * config.num_roles
    piece = min(config.piece, config.block_y)
    buffers = rows * piece * (config.turns * code.leaving_bytes + problem.side_bytes)
    if config.swap_ab:
        buffers = config.num_roles * config.role_m * config.block_y * 4  # turned upright through shared memory
    return int(stages + buffers) + RESERVED_BYTES


def fitted(problem: Problem, config: Config, code: Lowered) -> Config:
    """The config with as many stages as fit, and pieces that the epilogue can work on."""
    width = config.role_m if config.swap_ab else config.block_y
    config = replace(config, piece=min(max(config.piece, code.piece_columns), width))
    while config.num_stages > MIN_STAGES and shared_bytes(problem, config, code) > SHARED_BYTES:
        config = replace(config, num_stages=config.num_stages - 1)
    return config


def candidates(problem: Problem, code: Lowered) -> list[Config]:
    """The configs worth trying for a problem, each with as many stages as fit."""
    k = 256 if problem.scaled else 128 // problem.element_bytes
    per_group = -(-problem.M // max(1, problem.num_groups))
    found: list[Config] = []
    if code.whole:
        width = max(16, next_power_of_2(problem.N))
        found += [Config(64, 2, width, k, 12, piece=width), Config(64, 1, width, k, 12, piece=width)]
    elif problem.scaled:
        found += [
            Config(64, 2, 128, 128, 6, turns=2),
            Config(64, 2, 64, k, 4),
            Config(64, 1, 64, k, 6),
            Config(64, 1, 128, k, 4),
        ]
    else:
        found += [
            Config(128, 2, 128, k, 6, pingpong=True, piece=32 if problem.side_bytes else 64),
            Config(64, 2, 256, k, 4),
            Config(64, 2, 256, k, 5, pingpong=True),
            Config(64, 2, 128, k, 8, pingpong=True),
            Config(64, 2, 128, k, 6),
            Config(64, 1, 128, k, 8),
            Config(64, 1, 64, 2 * k, 6),
            Config(64, 1, 32, 2 * k, 8),
            Config(64, 1, 256, k, 5),
        ]
    wide = Config(64, 2, 128, 128, 5, wide_last=True)
    # With fewer rows weights bound it, and more of them in flight help more; with fewer stages wide tiles lose.
    if problem.scaled and per_group > 64 and fitted(problem, wide, code).num_stages == wide.num_stages:
        found.append(wide)
    if not code.whole and not code.leaving and not code.side:
        found += [
            Config(64, roles, tokens, depth, 12, swap_ab=True)
            for tokens in (8, 16, 32, 64, 128)
            if tokens < 2 * max(per_group, 8)
            for roles in (1, 2)
            for depth in ((k,) if problem.scaled else (k, 2 * k, 4 * k))
        ]
    if not problem.num_groups:
        found += [replace(c, split_k=s) for c in found for s in (2, 3, 4, 8, 16)]
    found = [fitted(problem, config, code) for config in found]
    return [config for config in dict.fromkeys(found) if not supports(problem, config, code)]


# Cycles, from measurements on an H200; they rank configs, no more.
LAUNCH, FIRST_STAGE, TILE, TURN, JOIN = 4000, 2500, 3000, 1500, 6000
L2_BYTES, DRAM_BYTES = 80, 2400  # a cycle: for one multiprocessor, for all


def predicted_cycles(problem: Problem, config: Config, num_sms: int) -> float:
    """How long a config should take."""
    groups = max(1, problem.num_groups)
    tokens = -(-problem.M // groups)
    tiles = round(groups * _tiles_of_group(problem, config, tokens) * -(-problem.N // config.block_n))
    steps = -(-problem.K // config.block_k)
    row_bytes = config.block_k * problem.element_bytes
    tensor = config.block_x / 64 * row_bytes / 32 * max(config.block_y / 2, 16)
    step = max(tensor, (config.block_x + config.block_y) * row_bytes / L2_BYTES)
    if problem.scaled:
        # Adding up the blocks: beside another role's products, or alone, or along the instruction's N side.
        step *= 1.2 if config.num_roles == 2 and not config.swap_ab else 1.35
    around = TURN if config.pingpong else TILE
    if config.wide_last:
        step, around = 1.02 * step, 1.15 * around
    rounds, rest = divmod(tiles, num_sms)
    cycles = rounds * (steps * step + around)
    if rest and config.split_k > 1:
        parts = -(-rest * config.split_k // num_sms)
        cycles += parts * (-(-steps // config.split_k) * step + TILE)
        cycles += JOIN * config.split_k**0.5
    elif rest:
        cycles += steps * step + around
    moved = problem.element_bytes * problem.K * (problem.M + groups * problem.N) + 2 * problem.M * problem.N
    memory = moved / DRAM_BYTES
    # Whichever is longer hides most of the other.
    return LAUNCH + FIRST_STAGE + TILE + max(cycles, memory) + 0.2 * min(cycles, memory)


def _tiles_of_group(problem: Problem, config: Config, tokens: int) -> float:
    """Tiles along an expert's tokens; with factors along K in the mean over routing at random."""
    if not problem.num_groups or not problem.scaled:
        return -(-tokens // config.block_m)
    return expected_tiles(tokens, sqrt(tokens), 1 - exp(-tokens), config.block_m)


def expected_tiles(mean: float, deviation: float, any_row: float, block_m: int) -> float:
    """Tiles of block_m rows that an expert's rows fill or begin: sum over j >= 0 of P(rows > j * block_m).

    mean, deviation: of the rows. any_row: the probability of at least one; beyond that the tail is the normal
    distribution's.
    """
    certain = max(1, int(mean - 6 * deviation) // block_m)
    tiles = certain - 1 + any_row
    for most in range(certain * block_m, ceil(mean + 6 * deviation), block_m):
        tiles += 0.5 * erfc((most + 0.5 - mean) / (deviation * sqrt(2)))
    return tiles


def default_config(problem: Problem, code: Lowered, num_sms: int) -> Config | None:
    """The config that should be fastest; None if none fits."""
    found = candidates(problem, code)
    return min(found, key=lambda config: predicted_cycles(problem, config, num_sms), default=None)
