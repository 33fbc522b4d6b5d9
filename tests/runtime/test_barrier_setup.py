"""Setting up mbarriers without waits between them."""

import pytest

from envoi.runtime.barrier_setup import without_waits
from envoi.runtime.ptx_changes import changed

REMARK = "\t// envoi barriers 2: mbarriers are set up together %r9\n"
WAIT = "\tbar.sync \t0, 128;\n"
BETWEEN = "\tadd.s32 \t%r83, %r81, 217184;\n\t// begin inline asm\n"
FENCE = "\tfence.proxy.async.shared::cta;\n"


def setup(register: int, thread: str = "%p15", count: int = 1) -> str:
    return f"\t@{thread} mbarrier.init.shared::cta.b64 [%r{register}], {count};\n\t// end inline asm\n"


def left(text: str) -> str:
    return "".join(line + "\n" for line in without_waits(text).split("\n") if line.strip())


def test_waits_between_two_are_left_out():
    text = REMARK + setup(1) + setup(2) + WAIT + BETWEEN + setup(3, count=2) + WAIT + setup(4) + FENCE + WAIT
    assert left(text) == REMARK + setup(1) + setup(2) + BETWEEN + setup(3, count=2) + setup(4) + FENCE + WAIT
    assert changed(text) == without_waits(text), "what is compiled goes through it"


def test_kernels_without_roles_have_them_left_out_too():
    """All warps wait there, and the compiler reads parameters late."""
    wait, parameter = "\tbar.sync \t0;\n", "\tld.param.b64 \t%rd20, [few_kernel_param_11];\n"
    text = REMARK + setup(1) + wait + parameter + BETWEEN + setup(2) + wait + setup(3) + FENCE + wait
    assert left(text) == REMARK + setup(1) + parameter + BETWEEN + setup(2) + setup(3) + FENCE + wait


@pytest.mark.parametrize(
    "between",
    [
        "\tst.shared.b32 \t[%r5], %r6;\n", "\tld.global.b32 \t%r5, [%rd6];\n", "$L__BB0_7:\n",
        "\t@%p2 bra \t$L__BB0_7;\n",
        "\tmbarrier.arrive.shared::cta.b64 _, [%r5];\n", "\tatom.global.add.u32 \t%r5, [%rd1], 1;\n", FENCE,
        "\tcp.async.bulk.commit_group;\n", "\tmov.b32 \t%r5, 1; st.shared.b32 [%r5], 1;\n\tst.shared.b32 [%r5], 1;\n",
    ],
)  # fmt: skip
def test_a_wait_beside_anything_else_stays(between):
    """Memory, branches and other barriers may need it."""
    for text in (REMARK + setup(1) + between + WAIT + setup(2), REMARK + setup(1) + WAIT + between + setup(2)):
        assert left(text) == text


def test_a_wait_stays_if_another_thread_sets_up_the_next():
    text = REMARK + setup(1) + WAIT + setup(2, "%p16") + WAIT + setup(3, "%p16")
    assert left(text) == REMARK + setup(1) + WAIT + setup(2, "%p16") + setup(3, "%p16")
