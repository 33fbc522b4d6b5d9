"""Programs that run under compute-sanitizer: `python -m tests.promises.sanitized NAME FILE`.

Writes to FILE which kernels it launched, and with `--role-tables` in front of NAME where their machine code has
Triton's table of roles. Exit status 1 if a result is wrong: a tool that changes results hides errors.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from triton.runtime.jit import JITFunction

import envoi
from envoi.epilogues import library
from envoi.ops.gemm.hopper import host
from envoi.ops.gemm.hopper.candidates import candidates
from envoi.ops.indexer import fast
from envoi.ops.indexer.select import orders_for
from envoi.ops.moe.parallel.nvlink import SharedLayout
from envoi.ops.moe.parallel.placement import Placed, place
from envoi.quant import FORMATS, quantize
from envoi.runtime import launch, triton_compat
from envoi.runtime.devices import num_sms
from envoi.types import ExpertWeights, Routing
from tests.moe.layers import Layer, make
from tests.moe.parallel import domains
from tests.moe.parallel.cases import to
from tests.moe.parallel.interpreted.test_hosts import ranks_of
from tests.promises import subjects
from tests.promises.kernel_planted import diverging_kernel, outside_kernel, racing_kernel
from tests.promises.same_bits import same
from tests.promises.subjects import MAKERS, subject
from tools.machine_code import ptx
from tools.machine_code.disassemble import disassemble
from tools.machine_code.role_table import role_table
from tools.oracles.indexer_workloads import one, random_fp4_cache

DEVICE = torch.device("cuda")
OF_TORCH = "fp32"  # products that torch makes, as it does what quantises tokens: no kernel here
CONFIG_PARTS = {False: 6, True: 1}  # programs for the configs of a format: of plain GEMMs, of GEMMs by expert
ROWS = (1, 7, 64, 131, 300)
LENGTHS = (300, 100, 700, 200, 64, 0, 2200)
BAD_PAGES = ((0, 2, 2**31 - 1), (2, 10, -5), (4, 0, -(2**31)))
BAD_LENGTHS = ((1, -1), (3, 2**31 - 1))
WANT = [2, 1, 2, 1, 2, 0, 0]
WANT_OF_NO_PAGES = [2, 1, 2, 1, 2, 0, 2]


def planted(tool: str) -> bool:
    """Make the error that a tool is for."""
    if tool == "memcheck":
        outside_kernel[(1,)](torch.zeros(128, device=DEVICE), 128)
    elif tool == "racecheck":
        racing_kernel[(1,)](torch.zeros(128, dtype=torch.int32, device=DEVICE))
    else:
        diverging_kernel[(1,)](torch.zeros(128, dtype=torch.int32, device=DEVICE))
    torch.cuda.synchronize()
    return True


def rows_of(name: str) -> bool:
    """Run a subject on few rows and on many; return whether each row gives what it gives among all."""
    found, right = subject(name, DEVICE), True
    whole = found.run(*found.given(torch.arange(min(ROWS[-1], found.rows), device=DEVICE)))
    for count in ROWS:
        if count <= found.rows:
            rows = torch.arange(min(count, found.rows), device=DEVICE)
            if not same(found.run(*found.given(rows)), [x[rows] for x in whole]):
                print(f"{name}: {count} rows differ from the same rows among {len(whole[0])}", flush=True)
                right = False
    return right


def of_subjects(start: str) -> bool:
    """Run all subjects whose name starts so, and once without batch_invariant, which takes other kernels."""
    right = True
    for name in MAKERS:
        if name.startswith(start):
            right &= rows_of(name)
            plain = subject(name, DEVICE, batch_invariant=False)
            for count in ROWS:
                if count <= plain.rows:
                    plain.run(*plain.given(torch.arange(count, device=DEVICE)))
    return right


def configs(scheme: str, grouped: bool, part: int) -> bool:
    """Run configs that the Hopper GEMM may choose for a small problem, plain and with SwiGLU; compare with the first.

    part: of CONFIG_PARTS, which together run every config.
    """
    M, N, K, E = 200, 512, 768, 3
    of_a, of_b = subjects.GEMM_SCHEMES[scheme]
    source = torch.Generator().manual_seed(0)
    a = torch.randn(M, K, generator=source) * K**-0.5
    b = torch.randn(*((E, N, K) if grouped else (N, K)), generator=source)
    a, b = (
        x.to(DEVICE, torch.bfloat16) if s is None else quantize(x.cuda(), str(s)) for x, s in ((a, of_a), (b, of_b))
    )
    offsets = torch.tensor([0, 90, 90, M], dtype=torch.int32, device=DEVICE) if grouped else None
    right = True
    for ending in (library.store, library.swiglu):
        call, _ = host.planned(a, b, offsets, ending.ir, torch.bfloat16, {}, num_sms(DEVICE))
        first, *others = candidates(host.problem_of(call), call.code)
        wanted = None
        for config in (first, *others[part :: CONFIG_PARTS[grouped]]):
            for out in call.outputs:
                out.fill_(torch.nan)
            host.launch_gemm(call, config, num_sms(DEVICE))
            got = [out.float() for out in call.outputs]
            if wanted is None:
                wanted = [x.clone() for x in got]
            far = max(float(((x - y).abs() - 0.05 * y.abs()).max()) for x, y in zip(got, wanted, strict=True))
            if not far <= 0.05:
                print(f"{config}: {far:.3g} from {first}", flush=True)
                right = False
    return right


def hostile_indexer() -> bool:
    """Run the indexer on lengths and pages that point outside the cache: nothing there may be read.

    Without a certificate the exact mode runs on torch, which refuses them.
    """
    right = True
    for num_heads in (64, 32):
        q, cache, weights, seq_lens, table = (x.cuda() for x in one(LENGTHS, num_heads=num_heads).tensors())
        table[6, 34] = cache.shape[0] - 1
        for request, column, page in BAD_PAGES:
            table[request, column] = page
        for request, length in BAD_LENGTHS:
            seq_lens[request] = length
        for mode in ("fast", "exact") if orders_for(DEVICE, num_heads) is not None else ("fast",):
            _, errors = envoi.indexer_topk(q, cache, weights, seq_lens, table, k=512, mode=mode, return_errors=True)  # pyright: ignore[reportGeneralTypeIssues]
            right &= errors.tolist() == WANT
        _, errors = envoi.indexer_topk(q, cache[:0], weights, seq_lens, table, k=512, mode="fast", return_errors=True)  # pyright: ignore[reportGeneralTypeIssues]
        right &= errors.tolist() == WANT_OF_NO_PAGES
        fp4 = random_fp4_cache(len(cache), "cuda")
        _, errors = envoi.indexer_topk(q, fp4, weights, seq_lens, table, k=512, return_errors=True)  # pyright: ignore[reportGeneralTypeIssues]
        right &= errors.tolist() == WANT
        blocks, errors = envoi.indexer_blocks(q, fp4, weights, seq_lens, table, 16, return_errors=True)  # pyright: ignore[reportGeneralTypeIssues]
        right &= errors.tolist() == WANT
        blocks[:, 3] = 2**31 - 1  # a block that no row has
        tensors = q, cache, weights, seq_lens, table, blocks
        _, errors = envoi.indexer_topk_in_blocks(*tensors, 512, return_errors=True)  # pyright: ignore[reportGeneralTypeIssues]
        right &= errors.tolist() == WANT
        for row in range(len(LENGTHS)):
            only = slice(row, row + 1)
            given = q[only], cache, weights[only], seq_lens[only].clone(), table[only]
            _, errors = envoi.indexer_topk(*given, k=512, mode="fast", return_errors=True)  # pyright: ignore
            right &= errors.tolist() == WANT[only]
    return right


def portable_indexer() -> bool:
    """Run `hostile_indexer` with the scores of GPUs that aren't Hopper."""
    with mock.patch.object(fast, "implementation", lambda device: "triton"):
        return hostile_indexer()


def indexer_of_many_rows() -> bool:
    """Run the kernels of a prefill and of few rows of many requests, with pages outside and without."""
    many = (False, 64, 520, (700,)), (False, 32, 2, (130,) * 258), (True, 32, 520, (700,)), (True, 64, 2, (130,) * 258)
    return of_requests(many)


def indexer_of_long_rows() -> bool:
    """Run the kernels that select from rows: a program a row, clusters of 2, 4 and 8, and others, by all their ways."""
    calls = (5000, 700), (9000,), (17000, 3, 3000), (40000, 70000)
    return of_requests((False, 64, 1, lengths) for lengths in calls)


def of_requests(calls: Iterable[tuple[bool, int, int, tuple[int, ...]]]) -> bool:
    """Run calls of (keys in FP4, heads, rows of a request, lengths), with pages outside and without."""
    right = True
    for fp4, heads, next_n, lengths in calls:
        _, cache, _, seq_lens, table = (x.cuda() for x in one(lengths, num_heads=heads).tensors())
        cache = random_fp4_cache(len(cache), "cuda") if fp4 else cache
        rows = len(lengths) * next_n
        q, weights = torch.randn(rows, heads, 128, device=DEVICE), torch.randn(rows, heads, device=DEVICE)
        for bad in (None, -5):
            if bad is not None:
                table[0, 0] = bad
            for order in ("any", "position", "score"):
                given = q.to(torch.float8_e4m3fn), cache, weights, seq_lens, table
                _, errors = envoi.indexer_topk(*given, 512, next_n=next_n, order=order, return_errors=True)  # pyright: ignore
                right &= bool((errors[:next_n] == (0 if bad is None else 2)).all()) and not bool(errors[next_n:].any())
    return right


def _of_three_ranks(format: str) -> tuple[Layer, list[int], list[ExpertWeights], torch.Tensor]:
    """Return a layer, where its ranks' experts end, the ranks' experts, and what one rank gives."""
    layer = to(make(tokens=60, experts=8, k=3, hidden=256, intermediate=128), "cuda")
    r = layer.routing
    layer.routing = envoi.Routing(r.topk_weights.cuda(), r.topk_ids.cuda(), r.num_experts)
    ends = [0, 1, 5, 8]
    want = envoi.moe(layer.tokens, layer.routing, layer.pack(format), batch_invariant=True)
    return layer, ends, [layer.pack(format, first, last) for first, last in pairwise(ends)], want


def as_one_rank(got: torch.Tensor, want: torch.Tensor, presum: bool) -> bool:
    """Tell whether outputs have the bits of one rank or, where ranks sum rows first, are close to it."""
    return torch.allclose(got.float(), want.float(), rtol=0.05, atol=0.05) if presum else same([got], [want])


def between_ranks(format: str) -> bool:
    """Run the kernels of NVLink with three ranks in one process, with presum and without; compare with one rank."""
    layer, ends, packed, want = _of_three_ranks(format)
    right, placed = True, Placed.on(layer.tokens.device, range(8), 8, 0)
    for presum in (False, True):
        opened = domains.open_all(SharedLayout(3, 8, 60, 4, 256, format, presum), ends, "cuda")
        for _ in range(2):
            parts = domains.split(layer, [20, 20, 60])
            # Where experts are as without a placement: its kernel is watched too.
            slots = [place(placed, r.topk_weights, r.topk_ids) for _, r in parts]
            parts = [(x, Routing(*slot, 8)) for (x, _), slot in zip(parts, slots, strict=True)]
            got = torch.cat(domains.moe(opened, parts, packed))
            right &= as_one_rank(got, want, presum)
    return right


def around_collectives(format: str) -> bool:
    """Run the kernels around collectives with three ranks in one process, whose collectives are copies."""
    layer, ends, _, want = _of_three_ranks(format)
    right = True
    for presum in (False, True):
        sizes = {"max_tokens": 60, "expert_ends": ends[1:], "device": "cuda"}
        got = torch.cat(ranks_of(layer, format, list("abc"), [20, 20, 60], presum, **sizes).run())
        right &= as_one_rank(got, want, presum)
    return right


def between_hosts(format: str) -> bool:
    """Run the kernels between two hosts of two ranks in one process, whose collectives are copies."""
    layer, _, _, want = _of_three_ranks(format)
    right = True
    for presum in (False, True):
        sizes = {"max_tokens": 60, "expert_ends": [1, 1, 5, 8], "device": "cuda"}
        got = torch.cat(ranks_of(layer, format, list("abba"), [20, 20, 40, 60], presum, **sizes).run())
        right &= as_one_rank(got, want, presum)
    return right


def programs() -> dict[str, Callable[[], bool]]:
    """Return all programs by name, those that take longest first."""
    found: dict[str, Callable[[], bool]] = {}
    for operator in ("grouped_gemm", "gemm"):  # nvfp4 takes as long for an epilogue as others for all
        names = [name for name in MAKERS if name.startswith(f"{operator} nvfp4 ")]
        found |= {name: partial(of_subjects, name) for name in names}
    found |= {f"route {model}": partial(of_subjects, f"route {model}") for model in subjects.ROUTERS}
    found |= {f"moe {format}": partial(of_subjects, f"moe {format}") for format in FORMATS}
    for operator in ("grouped_gemm", "gemm"):
        for scheme in (name for name in subjects.GEMM_SCHEMES if name not in (OF_TORCH, "nvfp4")):
            found[f"{operator} {scheme}"] = partial(of_subjects, f"{operator} {scheme} ")
    for scheme in ("bf16", "fp8_row", "fp8_block128"):
        for grouped, parts in CONFIG_PARTS.items():
            for part in range(parts):
                name = f"configs of {'grouped_gemm' if grouped else 'gemm'} {scheme}, {part + 1} of {parts}"
                found[name] = partial(configs, scheme, grouped, part)
    found["indexer_topk"] = partial(of_subjects, "indexer_topk")
    found["indexer_topk, hostile"] = hostile_indexer
    found["indexer_topk, portable scores"] = portable_indexer
    found["indexer_topk, many rows"] = indexer_of_many_rows
    found["indexer_topk, long rows"] = indexer_of_long_rows
    found |= {f"ranks {format}": partial(between_ranks, format) for format in FORMATS}
    for format in ("bf16", "fp8_block128"):
        found |= {
            f"collectives {format}": partial(around_collectives, format),
            f"hosts {format}": partial(between_hosts, format),
        }
    return found


@contextmanager
def noting() -> Iterator[dict[str, Any]]:
    """Note the kernels that launches within the context load: module and name, and the PTX's hash -> the kernel."""
    original, found = JITFunction.run, dict[str, Any]()

    def run(self, *arguments, **named):
        kernel: Any = triton_compat.compiled_kernel(original(self, *arguments, **named))
        if kernel is not None:
            found[f"{self.fn.__module__}.{self.fn.__name__} {ptx.sha256(kernel.asm['ptx'])}"] = kernel
        return kernel

    launch._compiled.clear()  # kernels found in this cache would bypass the observer
    JITFunction.run = run  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield found
    finally:
        JITFunction.run = original


def role_tables(kernels: Iterable[Any]) -> dict[str, list[tuple[list[int], list[int]]]]:
    """Return where each kernel reads and writes its table of roles, by the kernels' names in machine code."""
    found: dict[str, list[tuple[list[int], list[int]]]] = {}
    for kernel in kernels:
        major, minor = torch.cuda.get_device_capability()
        table = role_table(disassemble(kernel.asm["cubin"], f"sm_{major}{minor}").text)
        found.setdefault(kernel.metadata.name, []).append((sorted(table.reads), sorted(table.writes)))
    return found


def main(given: list[str] | None = None) -> int:
    """Run a program; return the exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--role-tables", action="store_true")
    parser.add_argument("name")
    parser.add_argument("file", type=Path)
    args = parser.parse_args(given)
    name = args.name
    run = partial(planted, name.partition(" ")[2]) if name.startswith("planted ") else programs()[name]
    with noting() as launched:
        right = run()
        torch.cuda.synchronize()
    said = {"right": right, "launched": sorted(launched), "role_tables": {}}
    args.file.write_text(json.dumps(said))
    if args.role_tables:  # no table is known if nothing here disassembles: then all reports count
        args.file.write_text(json.dumps(said | {"role_tables": role_tables(launched.values())}))
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
