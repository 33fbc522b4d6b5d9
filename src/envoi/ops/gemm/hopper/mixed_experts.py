"""Tiles of a grouped GEMM in an order that mixes experts with many rows and with few.

An expert with few rows is bound by its weights, which memory has to send; one with many by its products. Expert after
expert, memory idles beside the rows of a popular one, and then the tensor cores beside the others. In turns both have
work:

    experts in turn     AAAAAAAAAAAAAAAAbbccddeeffgghhii     A: 1000 rows, b to i: 20 rows each
    kinds in turns      bAbAcAcAdAdAeAeAfAfAgAgAhAhAiAiA

Tiles are numbered kind by kind, experts with many rows first, both in the experts' order. CTAs take places 0, 1, 2, ..
of the order above, and the tile at a place follows from how many tiles either kind has, by a product. What roles tell
each other, and a trace's events, are places.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon

from envoi.epilogues.device import plus
from envoi.ops.gemm.hopper.expert_rows import rows_of, rows_of_all
from envoi.ops.gemm.hopper.problem import Problem
from envoi.runtime.aggregate import Scalar, aggregate

MANY_ROWS = gl.constexpr(128)  # of an expert, beyond which it counts as one with many
MOST_ROWS = gl.constexpr(2**20)  # of all experts, beyond which nothing is mixed: see `both` in `create`
MOST_SHARE = gl.constexpr(4294967040.0)  # the largest float32 below 2**32


@aggregate
class MixedTiles:
    """Tiles of each expert, in the mixed order; as `tile_scheduler.ExpertTiles`, whose interface it has.

    With `RowMode.has_tail` rows of no expert come last, not mixed.
    """

    # int32 [max_experts]: the end of an expert's tiles, counted along the tokens, above `id_bits` bits that say which
    # expert it is; 0 if it has no rows. One search finds both.
    ends: gl.tensor
    num_token_tiles: gl.tensor  # int32, of all experts, without the tail's
    num_many: gl.tensor  # int32, those of experts with many rows
    share: gl.tensor  # uint32, num_many / num_token_tiles times 2**32, rounded: any gives each tile one place
    num_feature_tiles: Scalar
    problem: Problem

    @staticmethod
    @gluon.jit
    def create(problem, num_feature_tiles):
        """Number the tiles of all experts. Rows outside [0, M) are left out; `offsets` mustn't decrease."""
        ids, begin, end = rows_of_all(problem)
        bits: gl.constexpr = id_bits(problem.max_experts)
        mixes = gl.sum(end - begin, axis=0) <= MOST_ROWS  # there may be room for many more
        is_expert = ids < problem.num_experts
        is_many = (end - begin > MANY_ROWS) & is_expert & mixes
        counts = gl.cdiv(end - begin, problem.cfg.block_m)
        both = gl.where(is_many, counts << 16, counts)  # one scan for both kinds: at most 15 and 16 bits of tiles
        total = gl.sum(gl.where(is_expert, both, 0), axis=0)
        both_ends = gl.associative_scan(both, 0, plus)
        low = gl.where(mixes, 0xFFFF, -1)
        num_many = gl.where(mixes, total >> 16, 0)
        ends = gl.where(is_many, both_ends >> 16, num_many + (both_ends & low))
        ends = gl.where(counts > 0, (ends << bits) + ids, 0)
        num_tiles = num_many + (total & low)
        share = num_many.to(gl.float32) / gl.maximum(num_tiles, 1).to(gl.float32) * 4294967296.0
        share = gl.minimum(share, MOST_SHARE).to(gl.uint32)
        return MixedTiles(ends, num_tiles, num_many, share, num_feature_tiles, problem)

    @gluon.jit
    def of_next(self, problem, num_feature_tiles):
        """Return the tiles of a GEMM on the same rows, with other features, in tiles of as many rows."""
        gl.static_assert(problem.cfg.block_m == self.problem.cfg.block_m)
        return MixedTiles(self.ends, self.num_token_tiles, self.num_many, self.share, num_feature_tiles, problem)

    @gluon.jit
    def tiles_of_experts(self):
        """Return the number of tiles without the tail's."""
        return self.num_token_tiles * self.num_feature_tiles

    @gluon.jit
    def num_tiles(self):
        """Return the number of all tiles."""
        return self.tile_end(gl.max(self.ends, axis=0))

    @gluon.jit
    def tile_end(self, found):
        """Return the end of the tiles of the expert that an element of `ends` says."""
        return (found >> id_bits(self.problem.max_experts)) * self.num_feature_tiles

    @gluon.jit
    def find(self, tile):
        """Return the expert of a tile, the expert's rows [begin, end), and the number of tiles before the expert's."""
        found = self.search(tile)
        expert = found & (self.problem.max_experts - 1)
        begin, end = rows_of(expert, self.problem)
        num_tiles = gl.cdiv(end - begin, self.problem.cfg.block_m) * self.num_feature_tiles
        return expert, begin, end, self.tile_end(found) - num_tiles

    @gluon.jit
    def search(self, tile):
        """Return the element of `ends` of the expert that a tile belongs to."""
        first = (tile // self.num_feature_tiles + 1) << id_bits(self.problem.max_experts)
        return gl.min(gl.where(self.ends >= first, self.ends, 2**31 - 1), axis=0)

    @gluon.jit
    def many_before(self, place):
        """Return how many of the tiles before a place are of experts with many rows."""
        share = gl.umulhi(place.to(gl.uint32), self.share).to(gl.int32)
        num_few = (self.num_token_tiles - self.num_many) * self.num_feature_tiles
        return clamp_share(share, place, self.num_many * self.num_feature_tiles, num_few)

    @gluon.jit
    def tile_at(self, place):
        """Return the tile that has a place in the order in which CTAs take them."""
        before = self.many_before(place)
        is_many = self.many_before(place + 1) > before
        tile = gl.where(is_many, before, self.num_many * self.num_feature_tiles + place - before)
        return gl.where(place < self.num_token_tiles * self.num_feature_tiles, tile, place)

    @gluon.jit
    def places_until(self, found):
        """Return how many places, from the first, have all tiles up to the last one of an expert, of its kind.

        found: element of `ends`, not the tail's. About as few as can be; all of the other kind's where the rounding of
        float32 hides that.
        """
        end = found >> id_bits(self.problem.max_experts)
        is_many = end <= self.num_many
        of_kind = gl.where(is_many, self.num_many, self.num_token_tiles - self.num_many)
        wanted = gl.where(is_many, end, end - self.num_many) * self.num_feature_tiles
        enough = wanted + (self.num_token_tiles - of_kind) * self.num_feature_tiles
        ratio = self.num_token_tiles.to(gl.float32) / of_kind.to(gl.float32)
        # The j-th tile of many rows is at place ceil(j * ratio) - 1, that of few at floor((j - 1) * ratio).
        places = (gl.where(is_many, wanted, wanted - 1).to(gl.float32) * ratio).to(gl.int32) + 2
        places = gl.minimum(places, enough)
        before = self.many_before(places)
        return gl.where(gl.where(is_many, before, places - before) < wanted, enough, places)


@gluon.jit
def clamp_share(share, place, num_many, num_few):
    """Clamp a share of the places before a place to what either kind has.

    A share that grows by 0 or 1 from one place to the next still does; in the end both kinds have all their tiles.
    """
    return min(max(share, place - num_few), num_many)


@gluon.constexpr_function
def id_bits(max_experts):
    """Return the bits of an expert's number."""
    return max_experts.bit_length() - 1
