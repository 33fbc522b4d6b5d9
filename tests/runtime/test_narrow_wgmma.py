"""PTX of products that are narrower than their tensors."""

import pytest

from envoi.runtime.narrow_wgmma import rewritten

REMARK = "\t// envoi narrow 1: wgmma of n{} is n{} %r7\n"


def product(columns: int, of: str = "bf16.bf16", k: int = 16, first: int = 1) -> str:
    registers = ",".join(f"%r{first + i}" for i in range(columns // 2))
    ending = "p, 1, 1, 0, 0;" if k == 16 else "p, 1, 1;"
    return f"\twgmma.mma_async.sync.aligned.m64n{columns}k{k}.f32.{of} {{{registers}}}, %rd1, %rd2, {ending}\n"


@pytest.mark.parametrize(("columns", "used"), [(256, 208), (256, 136), (128, 72), (128, 120), (256, 248)])
@pytest.mark.parametrize(("of", "k"), [("bf16.bf16", 16), ("f16.f16", 16), ("e4m3.e4m3", 32)])
def test_the_first_columns_are_left(columns, used, of, k):
    before = (
        REMARK.format(columns, used) + product(columns, of, k) + "\tmov.u32 %r1, %r2;\n" + product(columns, of, k, 500)
    )
    after = REMARK.format(columns, used) + product(used, of, k) + "\tmov.u32 %r1, %r2;\n" + product(used, of, k, 500)
    assert rewritten(before) == after


def test_without_a_remark_nothing_changes():
    text = product(256) + "// envoi is only a word here\n"
    assert rewritten(text) is text


def test_remarks_that_contradict_each_other_or_fit_nothing_are_refused():
    with pytest.raises(ValueError, match=r"expected one width in a kernel, got \[\(256, 200\), \(256, 208\)\]"):
        rewritten(REMARK.format(256, 208) + REMARK.format(256, 200) + product(256))
    with pytest.raises(ValueError, match="expected products of 256 columns, found none"):
        rewritten(REMARK.format(256, 208) + product(128))
