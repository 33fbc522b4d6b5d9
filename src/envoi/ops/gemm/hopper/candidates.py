"""Configs of the Hopper GEMM that are worth trying for a problem, and the one that the model of time prefers."""

from dataclasses import replace
from functools import lru_cache

from envoi.epilogues.lower import Lowered
from envoi.ops.gemm.hopper.config import (
    FEW_TOKENS,
    HIGH_BANDS,
    L2_KEEPS,
    LONG_K,
    LOW_BANDS,
    NARROWED,
    NARROWED_FEATURES,
    PINGPONG_MAX_ROWS_LONG_K,
    PINGPONG_ROWS,
    TWO_WIDTHS,
    Config,
    Problem,
    fitted,
    why_not,
)
from envoi.ops.gemm.hopper.time_model import predicted_cycles, rows_of_neighbours, sent_cycles, tensor_cycles
from envoi.runtime.devices import H200
from envoi.runtime.math import cdiv, next_power_of_2

MOST_TIMES_ROWS = 4  # an expert's mean number of rows, that a tile of few tokens holds: rows vary with the routing


def candidates(problem: Problem, code: Lowered, num_sms: int = H200.num_sms) -> list[Config]:
    """Return the configs worth trying for a problem, each with as many stages as fit."""
    k = 256 if problem.scaled else 128 // problem.element_bytes
    per_group = cdiv(problem.M, max(1, problem.num_groups))
    found: list[Config] = []
    if code.whole_rows:
        width = max(16, next_power_of_2(problem.N))
        found += [Config(64, consumers, width, k, 12, epilogue_columns=width) for consumers in (2, 1)]
    elif code.paired:
        found += [Config(64, 2, 128, 128, 6, paired_tiles=True), Config(64, 1, 128, k, 4, paired_tiles=True)]
    elif problem.scaled:
        found += [
            Config(64, 2, 128, 128, 6, num_store_buffers=2),
            Config(64, 2, 64, k, 4),
            Config(64, 1, 64, k, 6),
            Config(64, 1, 128, k, 4),
        ]
        # With fewer tokens memory has no time to spare, with more the products haven't: turns cost them (measured).
        least, most = PINGPONG_ROWS
        if problem.num_groups and least <= per_group <= (PINGPONG_MAX_ROWS_LONG_K if problem.K > LONG_K else most):
            found += [Config(64, 2, 128, k, 4, pingpong=True), Config(64, 2, 128, 128, 8, pingpong=True)]
    else:
        if per_group > FEW_TOKENS or not problem.num_groups:  # half empty: 3 to 7 % slower (measured with 64 rows)
            columns = 32 if problem.tma_operand_bytes else 64
            found.append(Config(128, 2, 128, k, 6, pingpong=True, epilogue_columns=columns))
        found += [
            Config(64, 2, 256, k, 4),
            Config(64, 2, 256, k, 5, pingpong=True),
            Config(64, 2, 128, k, 8, pingpong=True),
            Config(64, 2, 128, k, 6),
            Config(64, 1, 128, k, 8),
            Config(64, 3, 128, k, 6),
            Config(64, 1, 64, 2 * k, 6),
            Config(64, 1, 256, k, 5),
        ]
        # Few tokens on the M side fill half a box, and narrow tiles of features load it often.
        if problem.num_groups or problem.M > FEW_TOKENS or (code.partials and not code.maxima_together):
            found.append(Config(64, 1, 32, 2 * k, 8))
        if problem.tma_operand_bytes:  # long epilogues, of which eight warps have half as much each
            found.append(Config(128, 2, 128, k, 6, 8, pingpong=True, epilogue_columns=32))
    wide = Config(64, 2, 128, 128, 5, wide_tail_tiles=True, paired_tiles=code.paired)
    # With fewer rows, loading weights bounds the time and more stages help more; wide tiles need all their stages.
    if problem.scaled and per_group > 64 and fitted(problem, wide, code).num_stages == wide.num_stages:
        found.append(wide)
    if not code.whole_rows and not code.tma_outputs and not code.tma_operands and not code.paired:
        found += few_tokens_configs(problem, code, k)
    found = [in_bands(problem, config, num_sms) for config in found]
    if not problem.num_groups and not problem.whole_k:
        found += [part for config in found for part in _split(config)]
    if not problem.num_groups:
        uneven = two_widths(k)
        uneven += narrowed_configs(problem.M, k) if code.elementwise else []
        uneven += narrowed_features(problem.N, k) if code.elementwise and problem.M > FEW_TOKENS else []
        found += [in_bands(problem, config, num_sms) for config in uneven]
    sizes = replace(problem, M=0)  # what fits doesn't depend on the tokens
    fitting = (_fitting(sizes, config, code) for config in found)
    return [config for config in dict.fromkeys(fitting) if config is not None]


@lru_cache(maxsize=4096)  # copies take longer than all that is asked of them
def _split(config: Config) -> list[Config]:
    """Return a config with each of the numbers of parts that K may be cut into."""
    return [replace(config, split_k=parts) for parts in (2, 3, 4, 8, 16)]


@lru_cache(maxsize=4096)
def _fitting(problem: Problem, config: Config, code: Lowered) -> Config | None:
    """Return the config with as many stages as fit, None if it can't run this problem with this epilogue."""
    found = fitted(problem, config, code)
    return None if why_not(problem, found, code) else found


def few_tokens_configs(problem: Problem, code: Lowered, k: int) -> list[Config]:
    """Return configs with the features on the M side, for an epilogue that is lowered to plain loads and stores.

    k: elements of K in a stage, at least.
    """
    per_group = cdiv(problem.M, max(1, problem.num_groups))
    sums = code.partials and not code.maxima_together
    most = 128 if not code.partials else 32 if sums else 64  # more rows of partials spill
    found = [
        Config(64, consumers, tokens, depth, 12, swap_ab=True, swizzle_rows=_band_of_few(problem, tokens))
        for tokens in (8, 16, 32, 64, 128)
        if tokens < MOST_TIMES_ROWS * max(per_group, 8) and tokens <= most
        for consumers in (1, 2)
        for depth in ((k,) if problem.scaled else (k, 2 * k, 4 * k))
    ]
    narrow = 8 * cdiv(problem.M, 8)
    if narrow in NARROWED and next_power_of_2(narrow) <= most and not (problem.num_groups or sums):
        found += [Config(64, consumers, narrow, k, 12, swap_ab=True) for consumers in (1, 2)]
    return found


def _band_of_few(problem: Problem, tokens: int) -> int:
    """Return the rows of tiles in a band: one if a plain GEMM has several tiles of tokens, which share weights."""
    return LOW_BANDS[0] if not problem.num_groups and tokens < problem.M else Config.swizzle_rows


def two_widths(k: int) -> list[Config]:
    """Return configs with two accumulators a consumer, of which a plain GEMM may take those that `why_not` allows.

    k: elements of K in a stage.
    """
    found: list[Config] = []
    for block_y in TWO_WIDTHS:
        columns = min(64, block_y & -block_y)  # as many as both widths are multiples of
        alone = Config(64, 2, block_y, k, 8, epilogue_columns=columns)
        found += [alone, replace(alone, pingpong=True), replace(alone, num_consumers=1)]
    return [*found, Config(64, 3, 96, k, 8, epilogue_columns=32)]


def narrowed_configs(num_tokens: int, k: int) -> list[Config]:
    """Return configs whose tiles have just as many tokens as share all tokens equally, in eights.

    k: elements of K in a stage.
    """
    many = [width for width in NARROWED if width > FEW_TOKENS]
    shares = range(cdiv(num_tokens, max(many)), cdiv(num_tokens, min(many)) + 1)
    widths = sorted({8 * cdiv(num_tokens, 8 * share) for share in shares}.intersection(many))
    found: list[Config] = []
    for tokens in widths:
        shared = Config(64, 2, tokens, k, 12, swap_ab=True)
        found += [replace(shared, num_consumers=1), replace(shared, pingpong=True)]
        found += [shared, replace(shared, num_consumers=3)]
    return found


def narrowed_features(num_features: int, k: int) -> list[Config]:
    """Return configs with the tokens on the M side, whose tiles have as many features as divide all of them.

    k: elements of K in a stage.
    """
    found: list[Config] = []
    for features in NARROWED_FEATURES:
        if num_features % features == 0:
            shared = Config(64, 2, features, k, 12, epilogue_columns=min(64, features & -features))
            found += [shared, replace(shared, num_consumers=1), replace(shared, pingpong=True)]
    return found


def in_bands(problem: Problem, config: Config, num_sms: int) -> Config:
    """Return a plain GEMM's config with tiles walked in bands for which the L2 sends no more than it has to.

    Bands are high, so that y, which is read once a band, comes from memory seldom; where neighbours would ask the L2
    for more than it sends while they multiply, lower ones, the lowest if the L2 keeps y.
    """
    if problem.num_groups or problem.M <= FEW_TOKENS:
        return config
    y_bytes = (problem.M if config.swap_ab else problem.N) * problem.K * problem.element_bytes
    tensor = tensor_cycles(config, config.block_k * problem.element_bytes)

    def rows(config: Config) -> float:
        return sum(rows * share for rows, share in rows_of_neighbours(problem, config))

    def cycles(config: Config) -> int:
        return round(sent_cycles(problem, config, tensor, num_sms))

    high, low = _with_bands(config)
    low = low[-1:] if y_bytes > L2_KEEPS else sorted(low, key=rows)
    return min([*sorted(high, key=rows), *low], key=cycles)


@lru_cache(maxsize=4096)  # see `_split`
def _with_bands(config: Config) -> tuple[list[Config], list[Config]]:
    """Return a config with each of the high bands, and with each of the low ones."""
    high, low = ([replace(config, swizzle_rows=band) for band in bands] for bands in (HIGH_BANDS, LOW_BANDS))
    return high, low


def default_config(problem: Problem, code: Lowered, num_sms: int) -> Config | None:
    """Return the config that should be fastest; None if none fits."""
    found = candidates(problem, code, num_sms)
    return min(found, key=lambda config: predicted_cycles(problem, config, num_sms), default=None)
