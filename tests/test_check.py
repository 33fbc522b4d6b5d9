"""Refusals say which argument, what was expected and what came."""

import pytest
import torch

from envoi.check import expect_choice, expect_divisible, expect_int, expect_tensor


def refused(message: str, function, *args, **kwargs) -> None:
    with pytest.raises(ValueError) as caught:
        function(*args, **kwargs)
    assert str(caught.value) == message


def test_tensors():
    x = torch.zeros(3, 4, dtype=torch.int32)
    assert expect_tensor("x", x, torch.int32, (3, "columns"), x.device, contiguous=True) is x
    refused("x: expected int64 [3, 4], got int32 [3, 4]", expect_tensor, "x", x, torch.int64, (3, 4))
    refused("x: expected int32 [3, 5], got int32 [3, 4]", expect_tensor, "x", x, torch.int32, (3, 5))
    refused("x: expected int32 [rows], got int32 [3, 4]", expect_tensor, "x", x, torch.int32, ("rows",))
    refused("x: expected tensor [*, 5], got int32 [3, 4]", expect_tensor, "x", x, None, (None, 5))
    refused("x: expected int8 or int16, got list", expect_tensor, "x", [1], (torch.int8, torch.int16))
    refused("x: expected int32, got int 3", expect_tensor, "x", 3, torch.int32)
    refused("x: expected int32, got NoneType", expect_tensor, "x", None, torch.int32)


def test_device_and_layout():
    x = torch.zeros(3, 4)
    with pytest.raises(ValueError, match="x: expected a tensor on meta like the other arguments, got one on cpu"):
        expect_tensor("x", x, device=torch.device("meta"))
    with pytest.raises(
        ValueError, match=r"x: expected a contiguous tensor, got strides \(1, 4\); call .contiguous\(\)"
    ):
        expect_tensor("x", x.T, contiguous=True)


def test_numbers_and_choices():
    assert expect_int("k", 3, 1, 8) == 3
    refused("k: expected an int from 1 to 8, got 9", expect_int, "k", 9, 1, 8)
    refused("k: expected an int of at least 1, got 0", expect_int, "k", 0, 1)
    refused("k: expected an int from 1 to 8 (slots), got True", expect_int, "k", True, 1, 8, "slots")
    refused("k: expected an int of at least 1, got 2.0", expect_int, "k", 2.0, 1)
    assert expect_choice("mode", "a", ("a", "b")) == "a"
    refused("mode: expected one of 'a', 'b', got 'c'", expect_choice, "mode", "c", ("a", "b"))
    assert expect_divisible("hidden", 256, 128, "groups") == 256
    refused("hidden: expected a multiple of 128 (groups), got 2880", expect_divisible, "hidden", 2880, 128, "groups")
