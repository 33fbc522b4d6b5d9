"""Stored measurements: `bench/results/<gpu>.jsonl`, one JSON object per line, appended and never rewritten.

A later line with the same (suite, case, gpu, num_gpus) supersedes the earlier ones when the file is read.
"""

import json
import math
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

SUITES = {
    "gemm": "a @ b.T, nothing fused",
    "gemm_swiglu": "GEMM with a gated SiLU in its epilogue, gate and up columns interleaved",
    "gemm_quant": "GEMM with a gated SiLU in its epilogue, the output quantised to FP8 with a scale per 1x128",
    "gemm_epilogues": "GEMM with another epilogue",
    "gemm_fp8": "a @ b.T of FP8 operands, scales by row or by block of 128",
    "gemm_grouped": "rows sorted by expert, each expert with its own weight",
    "gemm_weights": "rows sorted by expert, so few that reading the weights takes the time",
    "router": "tokens -> Routing, each contender in a CUDA graph of 20 calls (on CPUs one call)",
    "router_call": "tokens -> Routing, one call with a cold L2 cache",
    "router_dense": "tokens -> Routing for more and more experts: compact output, and the dense form beside it",
    "moe": "tokens -> tokens through the chosen experts, also over ranks",
    "indexer_exact": "sparse attention's top-k slots, the bits of PyTorch's own path",
    "indexer_fast": "sparse attention's top-k slots, exact for scores of its own",
    "host": "host time of a call: until it returns, the device idle before it",
    "host_loop": "wall time of a call in a loop of eager calls, which the host or the device bounds",
    "gemm_drawn": "GEMMs of published models' layers, the sizes, epilogues and formats drawn from a seed",
    "grouped_drawn": "a rank's experts of published models, the sizes and formats drawn from a seed",
    "moe_drawn": "a rank's MoE layer of published models, the sizes and formats drawn from a seed",
    "router_drawn": "routers of published models, the numbers of tokens drawn from a seed",
    "model": "prefill and decode of a whole model in transformers, random weights",
    "engine": "prefill and decode of a whole model in a server's engine, random weights",
}
BASELINES = {
    "plain": "Envoi's own GEMM of the same operands with nothing fused",
    "bf16": "Envoi's own kernel on bf16 operands of the same shape",
    "copy": "a device copy that moves as many bytes, read and written, as the case has to",
    "cublas": "torch's matmul of the same operands alone, without what the epilogue does",
    "eager": "the same work in plain torch operators, one launch after the other",
    "compile": "eager under torch.compile; GEMMs with mode max-autotune-no-cudagraphs",
    "empty": "a kernel that does nothing: no call takes less",
    "tokens": "the time of reading the tokens once, by the copy rate of the same run",
    "dense": "Envoi with the weights as a dense [M, N] matrix too",
    "torch_grouped": "torch's grouped matmul, for FP8 in FP8 with scales of rows (bf16 on CPUs), else in bf16",
    "concat": "Envoi on weights with all gates' rows before all ups', as checkpoints store them; Envoi's own in turn",
    "interleaved": "Envoi on weights with gates' and ups' rows in turn; Envoi's own are as checkpoints store them",
    "torch_ep": "bf16: NCCL (gloo on CPUs) all-to-all and torch's grouped matmul",
    "vllm_triton": "vLLM's fused_experts in Triton, with its tuned configs, in the case's format",
    "vllm_marlin": "vLLM's Marlin kernels on the case's MXFP4 weights, bf16 activations",
    "vllm_deepgemm": "vLLM's permutation and activation around its DeepGEMM's grouped FP8 products",
    "vllm_engine": "vLLM's engine with the experts' kernels that it chooses itself",
    "vllm_engine_deep_gemm": "vLLM's engine with --moe-backend deep_gemm",
    "vllm_engine_marlin": "vLLM's engine with --moe-backend marlin",
    "sglang_engine": "SGLang's engine with the experts' kernels that it chooses itself",
    "routed": "Envoi's experts, and gate and top-k by envoi.route too (ENVOI_VLLM_ROUTE=1)",
    "humming_w8a8": "Humming's indexed products, FP8 weights in blocks and FP8 activations in groups of 128",
    "humming_w4a16": "Humming's indexed products, MXFP4 weights and bf16 activations",
    "humming_w4a8": "Humming's indexed products, MXFP4 weights and FP8 activations in groups of 128",
    "flashinfer": "FlashInfer's cutlass_fused_moe in the case's format, its tactics tuned",
    "triton_kernels": "triton_kernels' GEMMs for gpt-oss on the case's MXFP4 weights, bf16 activations",
    "sgl_deep_gemm": "sgl-deep-gemm's one-launch FP8 kernel over NVLink behind its own pre-dispatch kernel, which "
    "quantises the tokens; before 0.2.5 inputs staged outside the time",
    "sgl_deep_gemm_topk": "sgl-deep-gemm's FP8 scores of a paged cache, and torch.topk of them",
    "vllm_torch_topk": "FP8 scores of the DeepGEMM that vLLM bundles, and torch.topk of them: positions, best first",
    "vllm_cooperative_topk_set": "FP8 scores of the DeepGEMM that vLLM bundles, and its cooperative_topk: the set of "
    "positions in any order, where Envoi gives slots, in cases named batch best first",
    "vllm_persistent_topk_set": "FP8 scores of the DeepGEMM that vLLM bundles, and its persistent_topk: a set too",
    "vllm_per_row_topk_set": "FP8 scores of the DeepGEMM that vLLM bundles, of keys in one piece, and its "
    "top_k_per_row_prefill: a set too",
    "vllm_router": "torch's matmul (float32 logits if the rule has groups), and vLLM's grouped_topk or topk_softmax",
    "flashinfer_router": "FlashInfer's router GEMM to 16 tokens, above torch's, and its fused_topk_deepseek",
    "unordered": 'Envoi with order="any": the same set, not best first',
    "pytorch": "the operator's published reference in PyTorch, item by item",
    "grouped_mm": "transformers' own experts by torch's grouped matmul, in bf16",
    "batched_mm": "transformers' own experts by a batched matmul with each slot's weights copied, in bf16",
    "torch_mm": "torch's matmul of the case's tokens and a weight: what a call of torch's costs the host",
    "graph": "Envoi's own call, replayed from a CUDA graph (on CPUs made again)",
    "batch_invariant": "Envoi with batch_invariant=True, which gives a row the same bits whatever the others are",
    "not_batch_invariant": "Envoi with batch_invariant=False, of many tokens and experts, where it may differ",
    "separate": "Envoi's own call of the routed experts, the shared one as two GEMMs of Envoi's own, and a sum",
    "counted": "Envoi's own call over NCCL (gloo on CPUs) where ranks count the rows that they send",
    "staged": "Envoi's own call with the pull in a launch of its own, from a CUDA graph",
    "as_busy": "Envoi's own call with even routing, every rank's rows as many as the busiest rank's here",
    "fp8_results": "Envoi's own call with results=fp8_1x128: rows come back in FP8, a factor for each 128 columns",
    "launched": "Envoi's own call, launched by Python instead of replayed from a CUDA graph",
}


DETAILS = "details"  # a line may go without it
UNTUNED = {"configs": "by the model"}  # details of measurements


@dataclass(frozen=True)
class Measurement:
    """Measurement of a case on one machine, medians in microseconds.

    suite: one of `SUITES`. case: the sizes as `python -m bench --list` prints them.
    ours_us: Envoi. baselines: names from `BASELINES`, at least one, measured in the same run.
    floor_us: the work at the roofs measured in the same run; null if there is no such roof.
    tflops, gb_per_s: Envoi's rates, null if not meaningful.
    error: {"ours", "torch"} against float64; the suite's module defines it.
    gpu: the device's name, or the CPU's followed by " (CPU)". num_gpus: processes that shared the case.
    commit: followed by "-dirty" if the package differed from it. date: YYYY-MM-DD. n: repeats per median.
    details: other facts of this measurement by name, one line of text or a number each: the seed of a drawn case, a
        peer's version, peak memory. A line without any has no such key.

    Raises ValueError for a time that isn't one, and for names that `SUITES` and `BASELINES` don't have.
    """

    suite: str
    case: str
    ours_us: float
    baselines: dict[str, float]
    floor_us: float | None
    tflops: float | None
    gb_per_s: float | None
    error: dict[str, float]
    gpu: str
    num_gpus: int
    torch: str
    triton: str
    commit: str
    date: str
    n: int
    details: dict[str, str | float] = field(default_factory=dict)

    def __post_init__(self):
        numbers = [self.ours_us, *self.baselines.values(), *self.error.values()]
        if not all(isinstance(x, (int, float)) and 0 <= x < math.inf for x in numbers) or self.ours_us == 0:
            raise ValueError(f"{self.suite} {self.case}: expected finite times and errors of at least 0, got {numbers}")
        if self.suite not in SUITES or not self.baselines or not self.baselines.keys() <= BASELINES.keys():
            raise ValueError(f"{self.suite} {self.case}: expected a suite and baselines that `bench.evidence` names")

    @property
    def is_untuned(self) -> bool:
        """Return True if `--untuned` measured it: Hopper GEMMs with configs by their model alone."""
        return UNTUNED.items() <= self.details.items()

    @property
    def key(self) -> tuple[str, str, str, int]:
        """Key shared by a measurement and the later ones that supersede it."""
        return self.suite, self.case, self.gpu, self.num_gpus


def to_line(measurement: Measurement) -> str:
    """Return one line of JSON, without the newline."""
    entries = asdict(measurement)
    if not entries[DETAILS]:
        del entries[DETAILS]
    return json.dumps(entries, allow_nan=False)


def from_line(line: str) -> Measurement:
    """Parse a line of `to_line`. Raises ValueError for other lines."""
    try:
        return Measurement(**json.loads(line))
    except TypeError as error:
        raise ValueError(f"expected the keys of a measurement: {error}") from error


def append(folder: Path, measurements: Iterable[Measurement]) -> list[Path]:
    """Append measurements to their files in `folder`, which is created if needed. Return the files."""
    paths: dict[Path, None] = {}
    for measurement in measurements:
        path = folder / f"{slug(measurement.gpu)}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(to_line(measurement) + "\n")
        paths[path] = None
    return list(paths)


def read(path: Path) -> list[Measurement]:
    """Return every measurement of a file, history too, in order. ValueError names the file and the line number."""
    history = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            try:
                history.append(from_line(line))
            except ValueError as error:
                raise ValueError(f"{path}:{number}: {error}") from error
    return history


def latest(history: Iterable[Measurement]) -> list[Measurement]:
    """Return the measurements that no later one supersedes, each at the place where its key first appeared."""
    last: dict[tuple, Measurement] = {}
    for measurement in history:
        last[measurement.key] = measurement
    return list(last.values())


def load(folder: Path) -> dict[str, list[Measurement]]:
    """Return the latest measurements of each file of a folder: {"h200": [...], "cpu": [...]}. No folder gives {}."""
    return {path.stem: latest(read(path)) for path in sorted(folder.glob("*.jsonl"))}


def slug(gpu: str) -> str:
    """Return the file name of a device: "NVIDIA H100 80GB HBM3" -> "h100", "AMD EPYC (CPU)" -> "cpu"."""
    if gpu.endswith("(CPU)"):
        return "cpu"
    kept = []
    for word in re.findall(r"[a-z0-9]+", gpu.lower()):
        if word not in ("nvidia", "geforce", "tesla"):
            kept.append(word)
            if any(letter.isdigit() for letter in word):
                break
    return "-".join(kept) or "gpu"
