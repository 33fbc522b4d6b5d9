"""Log of Envoi's calls, launches and compilations through Python's `logging`; free of cost unless ENVOI_LOG is set.

    ENVOI_LOG=call      (1) each operator call, with dtypes, shapes and devices
    ENVOI_LOG=config    (2) and each kernel launch, with grid, sizes and config; or a note that torch computes
    ENVOI_LOG=compile   (3) and each kernel compiled, or read from Triton's disk cache, with the time it took

The variable is read once, when envoi is imported. Records have the level INFO and go to the logger "envoi": to the
program's handlers, or to stderr while the root logger has none. Indirect calls are logged too (of a compiled graph,
or the grouped GEMMs of `envoi.moe` on a CPU); replays of a CUDA graph aren't.

    envoi: call moe(tokens=bfloat16 [4, 256] on cuda:0, topk_weights=float32 [4, 2] on cuda:0, ..)
    envoi: config gather_kernel, grid (4, 1): num_warps=4 stride=256 width=256 ..
    envoi: compile gather_kernel: 0.41 s
"""

import logging
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from envoi import env

CALL, CONFIG, COMPILE = 1, 2, 3
LEVEL = env.log_level()
MAX_TEXT = 300

_logger = logging.getLogger("envoi")


def call(name: str, names: Sequence[str], arguments: Sequence[Any]) -> None:
    """Log an operator's call from level CALL on. names: of its arguments; fewer may come if the last are defaults."""
    if LEVEL >= CALL:
        given = zip(names, arguments, strict=False)
        _logger.info("call %s(%s)", name, ", ".join(f"{n}={text(x)}" for n, x in given if x is not None and x != []))


def launch(kernel: Any, grid: tuple[int, ...], arguments: tuple, options: dict[str, Any]) -> None:
    """Log a launch from level CONFIG on."""
    if LEVEL >= CONFIG:
        given = zip(kernel.arg_names, arguments, strict=False)
        kept = [f"{name}={text(x)}" for name, x in [*options.items(), *given] if isinstance(x, (int, str))]
        kept += [_config(x) for x in arguments if is_dataclass(x)]
        _logger.info("config %s, grid %s: %s", kernel.__name__, tuple(grid), " ".join(kept))


def gemm_by_torch(a: Any, b: Any) -> None:
    """Log from level CONFIG on that torch computes a GEMM."""
    if LEVEL >= CONFIG:
        _logger.info("config gemm of %s and %s: torch", text(a), text(b))


def _config(x: Any) -> str:
    """Return a dataclass as text: its numbers, names and flags, without the generated code that some of them hold."""
    given = ((field.name, getattr(x, field.name)) for field in fields(x))
    whole = f"{type(x).__name__}({', '.join(f'{n}={v!r}' for n, v in given if isinstance(v, (int, float, str)))})"
    return whole if len(whole) <= MAX_TEXT else f"<{type(x).__name__}>"


def text(x: Any) -> str:
    """Return a short text: a tensor's dtype, shape and device; only the class of a value with a long repr."""
    if isinstance(x, torch.Tensor):
        return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)} on {x.device}"
    if isinstance(x, list):
        return f"[{', '.join(map(text, x))}]"
    whole = repr(x)
    return whole if len(whole) <= MAX_TEXT else f"<{type(x).__name__}>"


class _Stderr(logging.StreamHandler):
    """Handler for stderr, silent once the program has handlers of its own, which get the records too."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            super().emit(record)


def _start() -> None:
    _logger.setLevel(logging.INFO)
    handler = _Stderr()
    handler.setFormatter(logging.Formatter("envoi: %(message)s"))
    _logger.addHandler(handler)
    if LEVEL >= COMPILE:
        _listen_to_triton()


def _listen_to_triton() -> None:
    from triton import knobs

    before = knobs.compilation.listener

    def listener(**event: Any) -> None:
        if before is not None:
            before(**event)
        function = getattr(event["src"], "fn", None)  # None for a source that isn't Python
        if function is not None and function.__module__.startswith("envoi"):
            how = "from the disk cache" if event["cache_hit"] else f"{event['times'].total / 1e6:.2f} s"
            _logger.info("compile %s: %s", function.__name__, how)

    knobs.compilation.listener = listener


if LEVEL:
    _start()
