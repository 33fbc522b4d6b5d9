"""Cases of the kernels that `tuned.json` chooses: each of its keys names a problem and a kind of epilogue."""

import json
import re

import torch

from envoi.epilogue.slots import piece_columns, slots
from envoi.gemm.hopper import host, tune
from envoi.gemm.hopper.config import Problem
from tools.machine_code import hopper_recipes
from tools.machine_code.hopper_cases import CASES, Case

KEY = re.compile(r"(\d+)sm (\d+)x(\d+)x(\d+) (\d)B(.*)")
# One example for each kind of epilogue: the first whose key matches is taken.
TRIED = (
    "store", "swiglu", "gelu_residual", "swiglu_residual", "linear", "absmax", "softmax", "topk", "swiglu_fp8",
    "expert_l1_fp8", "expert_l1_mxfp8",
)  # fmt: skip


def cases() -> tuple[Case, ...]:
    """Return a case for every shipped key. Raises ValueError for a key that none of `TRIED` has."""
    if not tune.SHIPPED.exists():
        return ()
    return tuple(map(case_of, json.loads(tune.SHIPPED.read_text())))


def with_registered() -> tuple[Case, ...]:
    """Return the registered cases and those of `tuned.json`, one for each kernel."""
    kernels: dict[str, Case] = {}
    for case in (*CASES, *cases()):
        kernels.setdefault(repr(hopper_recipes.recipe(case)), case)
    return tuple(kernels.values())


def only_tuned() -> tuple[Case, ...]:
    """Return the cases of `tuned.json` whose kernel isn't registered."""
    return tuple(case for case in with_registered() if case not in CASES)


def case_of(key: str) -> Case:
    """Return a case whose config is filed under this key."""
    found = KEY.fullmatch(key)
    if found is None:
        raise ValueError(f"tuned.json: expected a key like '132sm 4096x4096x7168 2B tma', got {key!r}")
    num_sms, M, N, K, num_bytes = map(int, found.groups()[:5])
    kinds = found[6].split()
    format = "bf16" if num_bytes == 2 else "fp8_block128" if "scaled" in kinds else "fp8_row"
    num_experts = next((int(kind.removeprefix("groups")) for kind in kinds if kind.startswith("groups")), 0)
    name = key.replace(" ", "-")
    for epilogue in TRIED:
        case = Case(f"tuned-{name}", epilogue, M, N, K, format, num_experts, sent="sent" in kinds)
        if num_sms == hopper_recipes.NUM_SMS and _key(case) == key:
            return case
    raise ValueError(
        f"tuned.json: {key}: no epilogue of {', '.join(TRIED)} has this key on {hopper_recipes.NUM_SMS} "
        "multiprocessors, so no test can launch its kernel"
    )


def _key(case: Case) -> str:
    """Return the key of the case's config; "" if the Hopper kernel doesn't take the case."""
    given = hopper_recipes.inputs(case)
    ir = given.epilogue.ir
    if case.sent and [slot.kind for slot in slots(ir, torch.bfloat16)] != ["tile"]:
        return ""
    if case.N % piece_columns(ir) or host.supports_hopper(given.a, given.b, ir):
        return ""
    call, _ = hopper_recipes.planned(given)
    problem = Problem(case.M, case.N, case.K, call.a.itemsize, case.num_experts, call.scales is not None)
    return tune.key_of(problem, call.code, hopper_recipes.NUM_SMS)
