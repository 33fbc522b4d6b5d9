"""Fixtures of the interpreter's tests, as in tests/gemm/interpreted."""

from tests.gemm.interpreted.conftest import outputs_start_as_nan

__all__ = ["outputs_start_as_nan"]
