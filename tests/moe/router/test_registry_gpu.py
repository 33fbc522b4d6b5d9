"""Registered kernels of the router on a GPU: right results, and the code that was counted without a GPU."""

import pytest
import torch

from envoi.ops.moe.router import host
from tests.helpers.launches import assert_same_code, watched
from tests.moe.router.sides import EVERYTHING, Given, expected, judge, torchs_product
from tools.kernel_cases import router as cases

pytestmark = pytest.mark.gpu
HOPPER = (9, 0)


def maker(case):
    """Make a maker of tensors: normal numbers, logits about as large; ids of experts and of tokens."""
    seeds = iter(range(100))

    def make(shape, dtype):
        source = torch.Generator("cuda").manual_seed(next(seeds))
        if dtype == torch.int64:
            top = cases.VOCABULARY if len(shape) == 1 else case.N
            return torch.randint(0, top, shape, generator=source, device="cuda")
        x = torch.randn(shape, generator=source, device="cuda")
        return (x / case.hidden**0.5 if shape == (case.N, case.hidden) else x).to(dtype)

    return make


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.title)
def test_registered(case, monkeypatch):
    if case.kernel == "triton":
        monkeypatch.setattr(host, "takes_hopper", lambda call: False)
    x = cases.inputs(case, maker(case))
    rule, _ = cases.rule_of(case.rule)
    given = Given(x.tokens, x.gate, case.k, rule, 1.0, None, x.expert_bias, x.token_ids, x.hash_table)
    launched = {}
    with watched(lambda sha256, kernel: launched.setdefault(sha256, kernel.asm["ptx"])):
        got = given.route(
            **(EVERYTHING if case.everything else {}), batch_invariant=case.batch_invariant,
            weights_dtype=cases.DTYPES[case.weights],
        )  # fmt: skip
    if case.everything:
        judge(given, got)
    weights, ids = expected(given, torchs_product(x.tokens, x.gate))
    same = (got.topk_ids == ids).all(1)
    assert same.float().mean() > 0.99  # near ties may fall the other way
    rounding = 0.0 if case.weights == "fp32" else torch.finfo(got.topk_weights.dtype).eps / 2
    torch.testing.assert_close(got.topk_weights[same].float(), weights[same], rtol=1e-4 + rounding, atol=1e-6)
    if torch.cuda.get_device_capability() == HOPPER:
        assert_same_code(case.title, cases.launch_of(case), launched)
