"""The rule of tests/gemm/interpreted: memory that nobody wrote is NaN."""

from tests.gemm.interpreted.conftest import outputs_start_as_nan

__all__ = ["outputs_start_as_nan"]
