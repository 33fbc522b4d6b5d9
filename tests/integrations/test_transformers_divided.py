"""transformers' own expert parallel and tensor parallel, over two processes: the whole model's logits, or a refusal."""

import re

import pytest

from tests.helpers.quantised_models import compressed_fp8, fp4, fp8_blocks, fp8_matrices, mxfp4_blocks
from tests.helpers.ranks import run_ranks
from tests.helpers.slow import mostly_slow
from tests.helpers.transformers_models import build
from tests.integrations import divided

MAKE = {
    "bf16": lambda folder: build("qwen3_moe").save_pretrained(folder),
    "gpt_oss in bf16": lambda folder: build("gpt_oss").save_pretrained(folder),
    "fp8 blocks": lambda folder: fp8_blocks("qwen3_moe", folder),
    "mixtral in fp8 blocks": lambda folder: fp8_blocks("mixtral", folder),
    "fp8 matrices": lambda folder: fp8_matrices("qwen3_moe", folder),
    "fp4": lambda folder: fp4("deepseek_v3", folder),
    "mxfp4": mxfp4_blocks,
    "compressed by channel": lambda folder: compressed_fp8("qwen3_moe", folder, "channel"),
    "compressed by matrix": lambda folder: compressed_fp8("qwen3_moe", folder, "tensor"),
}
RUNS = [  # checkpoint, implementation, by experts, format
    ("bf16", "envoi", True, "bfloat16"),
    ("bf16", "envoi", False, "bfloat16"),
    ("bf16", "envoi_mxfp4", True, "bfloat16"),
    ("bf16", "envoi_fp8_row", False, "bfloat16"),
    ("gpt_oss in bf16", "envoi", True, "bfloat16"),
    ("gpt_oss in bf16", "envoi", False, "bfloat16"),
    ("fp8 blocks", "envoi", True, "fp8_block128"),
    ("fp8 matrices", "envoi", True, "fp8_row"),
    ("fp4", "envoi", True, "mxfp4"),
    ("fp4", "envoi_mxfp4_mxfp8", True, "mxfp4"),
    ("mxfp4", "envoi", True, "mxfp4"),
    ("mxfp4", "envoi", False, "mxfp4"),  # gpt-oss's plan leaves the experts' matrices whole
]
QUICK = [RUNS[0], RUNS[3], RUNS[6], RUNS[10]]
CURE = r"choose expert parallelism, DistributedConfig\(.., enable_expert_parallel=True\), or ep_size"
OTHER = "read each rank's experts by envoi.experts.from_checkpoint and run them by envoi.ExpertParallel"
REFUSALS = [
    ("mixtral in fp8 blocks", False, rf"FP8Experts.: .* got gate_up_proj divided along dimension 1: {CURE}"),
    ("fp4", False, rf"FP8Experts.: .* got gate_up_proj divided along dimension 1: {CURE}"),
    ("compressed by channel", True, rf"compressed-tensors' experts whole, got gate_up_proj divided .*{OTHER}"),
    ("compressed by matrix", True, rf"compressed-tensors' experts whole, got gate_up_proj divided .*{OTHER}"),
    ("compressed by channel", False, rf"compressed-tensors' experts whole, got gate_up_proj divided .*{OTHER}"),
]


@pytest.mark.parametrize(("checkpoint", "implementation", "experts", "format"), mostly_slow(RUNS, QUICK))
def test_the_logits_of_the_whole_model(checkpoint, implementation, experts, format, tmp_path):
    MAKE[checkpoint](tmp_path)
    outcomes = run_ranks(divided.NUM_RANKS, divided.run, str(tmp_path), implementation, experts)
    assert [outcome.text for outcome in outcomes] == [""] * divided.NUM_RANKS
    for found in (outcome.value for outcome in outcomes):
        assert found["error"] < min(0.02, found["without"] / 2)
        assert found["packed"] == found["first"] == len(found["rows"])
        assert found["same"] and found["released"]
        assert {(stored, why) for stored, why, _ in found["rows"]} == {(format, "")}
        assert all(num_bytes for *_, num_bytes in found["rows"])
        assert found["refreshed"] == 2 * found["packed"]
        if experts:
            parts = [num_bytes for *_, num_bytes in found["rows"]]
            assert [2 * part for part in parts] == found["whole"]


@pytest.mark.parametrize(("checkpoint", "experts", "message"), mostly_slow(REFUSALS, REFUSALS[1:3]))
def test_what_is_refused_names_the_cure(checkpoint, experts, message, tmp_path):
    MAKE[checkpoint](tmp_path)
    for outcome in run_ranks(divided.NUM_RANKS, divided.refused, str(tmp_path), "envoi", experts):
        assert outcome.text == ""
        assert re.search(message, outcome.value), outcome.value
