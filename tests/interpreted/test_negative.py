"""Tensors whose memory holds the negative of their elements, with the Triton kernels."""

from tests.test_negative import *  # noqa: F403
