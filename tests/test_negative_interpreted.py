"""Tensors whose memory holds the negative of their elements, with the Triton kernels in Triton's CPU interpreter."""

from pathlib import Path

from tests.helpers.interpreter import run_file


def test_in_the_interpreter():
    run_file(Path(__file__).with_name("test_negative.py"))
