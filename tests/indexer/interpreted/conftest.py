"""Tests in here need TRITON_INTERPRET=1 before anything is imported; tests/indexer/test_interpreted.py runs them so."""

from envoi import env
from tests.gemm.interpreted.conftest import outputs_start_as_nan, pytest_configure  # noqa: F401

collect_ignore_glob = [] if env.interpreting() else ["test_*.py"]
