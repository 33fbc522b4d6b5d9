"""Blackwell router without a Blackwell: which calls it takes, tilings that fit, its products on a simulated GPU."""

import random
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import envoi
from envoi.ops.moe.router import Rule, host, kernel_blackwell, tiling_blackwell
from envoi.ops.moe.router.spec import MAX_BLOCK, Spec
from envoi.ops.moe.router.tiling_blackwell import ROWS, TENSOR_COLUMNS, tiling_of
from envoi.runtime import ring
from envoi.runtime.devices import SHARED_BYTES
from envoi.runtime.program import without_memory
from tests.helpers.inputs import normal

BF16 = torch.bfloat16


# Which calls it takes


@pytest.fixture(autouse=True)
def used(monkeypatch):
    monkeypatch.setattr(tiling_blackwell, "IS_USED", True)


def test_no_call_takes_it_before_it_has_run(monkeypatch):
    monkeypatch.undo()
    assert grid() == PORTABLE


def grid(m=300, n=256, hidden=1024, k=8, arch="sm_100", dtype=BF16, gate=None, table=False, **options):
    """Return the grid of a planned call's only launch."""
    tokens, rows = without_memory((m, hidden), dtype), without_memory((n, hidden), gate or dtype)
    if table:
        options["token_ids"] = without_memory((m,), torch.int64)
        options["hash_table"] = without_memory((99, k), torch.int64)
    (launch,) = envoi.plan(envoi.route, tokens, rows, k, arch=arch, **options).launches
    assert launch.kernel == "router_kernel"
    return launch.grid


DTYPES = "tokens, gate: expected both bf16 or both fp16"
TAKEN, PORTABLE = (3,), (19,)  # blocks of 128 and of 16 of 300 rows


@pytest.mark.parametrize("arch", ["sm_100", "sm_103"])
def test_calls_that_it_takes(arch):
    bias = without_memory((256,), torch.float32)
    calls: list[dict[str, Any]] = [
        {}, {"n": 512}, {"n": 1, "k": 1}, {"k": 32}, {"dtype": torch.float16}, {"hidden": 24},
        {"expert_bias": bias, "rule": "deepseek-v3"}, {"logit_bias": bias, "rule": Rule("softmax_over_topk")},
        {"return_logits": True, "return_dense": True, "return_counts": True}, {"weights_dtype": torch.float16},
    ]  # fmt: skip
    for options in calls:
        assert grid(arch=arch, **options) == TAKEN, options
        assert grid(arch="sm_120", **options) == PORTABLE, options


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dtype": torch.float32}, f"{DTYPES}, got torch.float32 and torch.float32"),
        ({"gate": torch.float16}, f"{DTYPES}, got torch.bfloat16 and torch.float16"),
        ({"n": 513}, "gate.shape[0]: tensor memory has 512 columns, got 513 experts"),
        ({"rule": Rule("sigmoid", 16, 4)}, "rule.num_groups: a thread keeps the scores of at most 8 groups, got 16"),
        ({"table": True}, "hash_table: experts are looked up, not chosen"),
    ],
)
def test_calls_that_it_leaves_to_triton(options, reason, monkeypatch):
    why_not, found = host.why_not_blackwell, []
    monkeypatch.setattr(host, "why_not_blackwell", lambda call: found.append(why_not(call)) or found[-1])
    assert grid(**options) == PORTABLE
    assert set(found) == {reason}
    assert grid() == TAKEN and found[-1] == ""


# Tilings


@pytest.mark.parametrize("hidden", [8, 64, 1000, 2048, 7168, 16384])
@pytest.mark.parametrize("n", [1, 8, 33, 64, 128, 160, 256, 288, 384, 512])
def test_tilings_fit(n, hidden):
    for k in (1, min(n, 32)):
        tiling = tiling_of(hidden, Spec(n, k, Rule(), gluon=True))
        assert n <= tiling.columns < n + 128
        ctas = TENSOR_COLUMNS // (tiling.num_sets * tiling.columns)
        assert ctas >= 1
        steps = -(-hidden // tiling.block_k)
        assert 0 <= tiling.num_sets * tiling.steps_in_set - steps < tiling.steps_in_set, "a set without a product"
        assert tiling.steps_in_set * tiling.block_k <= MAX_BLOCK + tiling.block_k or ctas == 1
        stage_bytes = 2 * tiling.block_k * (ROWS + tiling.columns)
        assert tiling.num_stages * stage_bytes < SHARED_BYTES
        assert tiling.num_stages >= min(3, steps)
        assert tiling.width % tiling.chunk == 0


# The products on a GPU that does one thing at a time, in any order that barriers allow


class BrokenError(Exception):
    """The kernel's roles and units don't wait for each other."""


@dataclass
class Barrier:
    """An mbarrier of one arrival, and of bytes that TMA is to bring."""

    phase: int = 0
    missing_bytes: int = 0

    def complete(self) -> None:
        self.phase += 1


@dataclass
class Gpu:
    """Units of a CTA's multiprocessor: loads end in any order, products in theirs.

    x, y, accs: what stages and accumulators hold. reading: products that are to read a stage.
    """

    tokens: torch.Tensor
    gate: torch.Tensor
    tiling: Any
    source: random.Random
    loads: list = field(default_factory=list)
    products: list = field(default_factory=list)

    def __post_init__(self):
        t = self.tiling
        self.x = [None] * t.num_stages
        self.y = [None] * (t.num_stages * t.num_tiles)
        self.accs = torch.full((t.num_sets * t.num_tiles, ROWS, t.width), torch.nan, dtype=torch.float64)

    def wait(self, barrier, parity):
        """Let units work until the barrier has left the latest phase of this parity."""
        while barrier.phase & 1 == parity:
            queues = [queue for queue in (self.loads, self.products) if queue]
            if not queues:
                raise BrokenError("a wait for ever")
            queue = self.source.choice(queues)
            queue.pop(self.source.randrange(len(queue)) if queue is self.loads else 0)()

    def load(self, matrix, at, barrier, to):
        rows, columns = (ROWS if matrix is self.tokens else self.tiling.width), self.tiling.block_k
        if any(buffer is to for _, *buffers in self.reads() for buffer in buffers):
            raise BrokenError("a load into a stage that products are still to read")

        def arrive():
            box = torch.zeros(rows, columns, dtype=torch.float64)
            part = matrix[at[0] : at[0] + rows, at[1] : at[1] + columns]
            box[: part.shape[0], : part.shape[1]] = part
            to.set(box)
            barrier.missing_bytes -= 2 * rows * columns
            if barrier.missing_bytes == 0:
                barrier.complete()

        self.loads.append(arrive)

    def reads(self):
        return [work.read for work in self.products if hasattr(work, "read")]

    def multiply(self, x, y, acc, use_acc):
        def work():
            product = x.get() @ y.get().T
            self.accs[acc] = self.accs[acc] + product if use_acc else product

        work.read = (acc, x, y)
        self.products.append(work)

    def commit(self, barrier):
        self.products.append(barrier.complete)


@dataclass(eq=False)
class Buffer:
    """Box of a stage."""

    content: torch.Tensor | None = None

    def set(self, box: torch.Tensor) -> None:
        self.content = box

    def get(self) -> torch.Tensor:
        assert self.content is not None, "a product of a stage that was never loaded"
        return self.content

    def permute(self, order: tuple[int, int]) -> "Buffer":
        return self


class Slots(list):
    """Buffers or barriers of all stages."""

    def index(self, i: int) -> Any:
        return self[i]


def on_device(kind: Any, **fields: Any) -> Any:
    """Return what has an aggregate's methods, run as Python."""
    found = SimpleNamespace(**fields)
    for name, function in vars(kind).items():
        if hasattr(function, "fn"):
            setattr(found, name, partial(function.fn, found))
    return found


def multiplied(tokens, gate, row, seed, monkeypatch):
    """Run the kernel's own code of a CTA's products; return the sums of all sets, and the tiling."""
    hidden = tokens.shape[1]
    tiling = tiling_of(hidden, Spec(gate.shape[0], 1, Rule(), gluon=True))
    gpu = Gpu(tokens.double(), gate.double(), tiling, random.Random(seed))

    def expect(barrier, num_bytes, pred=True):
        barrier.missing_bytes += num_bytes

    monkeypatch.setattr(ring, "mbarrier", SimpleNamespace(wait=gpu.wait, expect=expect))
    monkeypatch.setattr(kernel_blackwell, "tma_load", lambda desc, *rest: gpu.load(desc.matrix, *rest))
    monkeypatch.setattr(kernel_blackwell, "tcgen05_mma", gpu.multiply)
    monkeypatch.setattr(kernel_blackwell, "tcgen05_commit", gpu.commit)
    monkeypatch.setattr(kernel_blackwell, "gl", SimpleNamespace(static_range=range, minimum=min))
    barriers = [Slots(Barrier() for _ in range(tiling.num_stages)) for _ in range(2)]
    stages = on_device(
        kernel_blackwell.Stages, num_steps=-(-hidden // tiling.block_k), tiling=tiling,
        ring=on_device(ring.Ring, full=barriers[0], empty=barriers[1], num_stages=tiling.num_stages),
        x=Slots(Buffer() for _ in gpu.x), y=Slots(Buffer() for _ in gpu.y),
        **{name: SimpleNamespace(matrix=matrix, block_type=SimpleNamespace(nbytes=2 * rows * tiling.block_k))
           for name, matrix, rows in (("x_desc", gpu.tokens, ROWS), ("y_desc", gpu.gate, tiling.width))},
    )  # fmt: skip
    kernel_blackwell.multiply_all.fn(stages, Slots(range(len(gpu.accs))), row)
    assert not gpu.products and not gpu.loads, "products that haven't ended"
    sums = gpu.accs.unflatten(0, (tiling.num_sets, tiling.num_tiles))
    return sums.sum(0).transpose(0, 1).flatten(1), tiling


@pytest.mark.parametrize(("n", "hidden"), [(8, 8), (24, 200), (160, 1000), (128, 2056), (256, 3072), (384, 1200)])
def test_products(n, hidden, monkeypatch):
    """Check that each set's products are complete, and that no load overwrites what products are to read."""
    tokens, gate = normal(200, hidden), normal(n, hidden, seed=1)
    for seed in range(3):
        sums, _ = multiplied(tokens, gate, 128, seed, monkeypatch)
        torch.testing.assert_close(sums[:72, :n], tokens[128:].double() @ gate.double().T)
        assert not bool(sums[72:].any()) and not bool(sums[:, n:].any()), "rows and columns that don't exist"


def test_the_simulation_finds_what_is_wrong(monkeypatch):
    tokens, gate = normal(128, 4096), normal(256, 4096)
    wait = ring.Ring.wait_empty.fn
    for wrong in (lambda ring, step: wait(ring, step + 4), lambda ring, step: None):
        with monkeypatch.context() as patched:
            patched.setattr(ring.Ring, "wait_empty", SimpleNamespace(fn=wrong))
            with pytest.raises((BrokenError, AssertionError)):
                multiplied(tokens, gate, 0, 1, patched)
