"""Fixtures of the interpreter's tests: unwritten memory is NaN, and few programs, as in the operators' own folders."""

from tests.gemm.interpreted.conftest import outputs_start_as_nan
from tests.moe.parallel.interpreted.conftest import few_programs as few_parallel_programs

__all__ = ["few_parallel_programs", "outputs_start_as_nan"]
