"""The rules of tests/gemm/interpreted: only in the interpreter, and memory that nobody wrote is NaN."""

from tests.gemm.interpreted.conftest import collect_ignore_glob, outputs_start_as_nan, pytest_configure

__all__ = ["collect_ignore_glob", "outputs_start_as_nan", "pytest_configure"]
