"""Cases of kernels are what planned calls launch."""

import pytest

from tools.kernel_cases.planning import Layer, LayerOfRanks, launch_of_call

LAYER = Layer("bf16", 512)


def test_a_case_is_a_launch_of_its_call():
    l1, l2 = (launch_of_call(LAYER, "gemm_kernel", which) for which in range(2))
    assert [tuple(x.arguments[0].base.shape) for x in (l1, l2)] == [(3072, 4096), (3072, 2048)]
    assert l1.grid == (132,) and l1.arguments[0].base.is_meta


def test_what_a_call_does_not_launch_is_no_case():
    with pytest.raises(ValueError, match="gemm_kernel: expected launch 2 of it .* 'combine_kernel'"):
        launch_of_call(LAYER, "gemm_kernel", 2)


def test_a_layer_is_planned_for_an_architecture():
    portable = Layer("fp8_block128", 2048, arch="sm_100")
    assert launch_of_call(portable, "quantize_kernel", arch="sm_100").arguments
    with pytest.raises(ValueError, match="quantize_kernel"):  # Hopper quantises in L1
        launch_of_call(Layer("fp8_block128", 2048), "quantize_kernel")


def test_ranks_send_what_they_sum():
    assert launch_of_call(LayerOfRanks(LAYER, 2), "sum_kernel").arguments
    summed = LayerOfRanks(LAYER, 2, presum=True)
    assert launch_of_call(summed, "send_partial_sums_kernel") and launch_of_call(summed, "sum_ranks_kernel")
