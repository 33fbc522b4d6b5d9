"""Launches of a layer that start before the one in front ends: which do, and that each waits before it writes."""

import re

import pytest
import torch

import envoi
from envoi.runtime.program import Launch
from tests.helpers.slow import mostly_slow
from tools.kernel_cases.planning import Layer, launches_of
from tools.machine_code.compile import compile_launch

WAIT = "griddepcontrol.wait"
FORMATS = {
    "bf16": ["sort", "gather", "gemm", "gemm", "combine"],
    "fp8_row": ["sort", "gather", "gemm", "quantize", "gemm", "combine"],
    "fp8_block128": ["sort", "gather", "fused", "combine"],
}


def launches(format: str, num_tokens: int = 256, arch: str = "sm_90") -> list[Launch]:
    """Return the launches of a layer of 2048/768 with 128 experts, 8 of them a token."""
    return launches_of(Layer(format, num_tokens, 2048, 768, 128, 8, arch=arch), arch)


@pytest.mark.parametrize("format", FORMATS)
def test_launches_of_a_layer_start_early(format):
    found = launches(format)
    assert [launch.kernel.fn.__name__.removesuffix("_kernel") for launch in found] == FORMATS[format]
    early = [launch.kernel.fn.__name__ for launch in found if launch.options.get("launch_pdl")]
    assert early == [f"{name}_kernel" for name in FORMATS[format] if name != "fused"]
    assert not any(launch.options.get("launch_pdl") for launch in launches(format, arch="sm_100"))


@pytest.mark.parametrize(
    ("num_tokens", "sorting"), [(1024, {"sort_kernel": True}), (4096, {"count_kernel": False, "place_kernel": False})]
)
def test_gemms_whose_experts_have_several_tiles_start_together(num_tokens, sorting):
    early = {x.kernel.fn.__name__: bool(x.options.get("launch_pdl")) for x in launches("bf16", num_tokens)}
    assert early == {**sorting, "gather_kernel": True, "gemm_kernel": False, "combine_kernel": True}


def test_a_grouped_gemm_by_itself_waits_for_the_launch_that_may_write_its_offsets():
    a, b = (torch.empty(*shape, dtype=torch.bfloat16, device="meta") for shape in ((512, 256), (8, 512, 256)))
    offsets = torch.empty(9, dtype=torch.int32, device="meta")
    (launch,) = envoi.plan(envoi.grouped_gemm, a, b, offsets).launches
    assert not launch.options["launch_pdl"]


@pytest.mark.compiles
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("num_tokens", mostly_slow([24, 256], [24]))
def test_each_waits_before_it_writes(format, num_tokens):
    for launch in launches(format, num_tokens):
        if not launch.options.get("launch_pdl"):
            continue
        text = compile_launch(launch, "sm_90").ptx
        name = launch.kernel.fn.__name__
        assert WAIT in text, name
        writes = re.search(r"\n\s+(@%p\d+ )?(st\.global|cp\.async\.bulk\.tensor\.\S+\.global\.shared)", text)
        if name != "gemm_kernel":  # whose roles follow, in any order
            assert writes is None or text.index(WAIT) < writes.start(), name
