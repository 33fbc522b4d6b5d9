"""Write an epilogue as a plain function, run it in a GEMM, and check it against the function itself.

python examples/gemm_epilogue.py        on a GPU or a CPU
"""

import torch

import envoi
from envoi.epilogues import Col, Scalar, epilogue, relu


@epilogue
def scale_bias_relu(acc, alpha: Scalar, bias: Col):  # Col: one value a column
    """Return relu(alpha * acc + bias)."""
    return relu(alpha * acc + bias)


def main() -> float:
    """Return the largest difference between the kernel's result and the epilogue applied to torch's product."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    a = torch.randn(512, 1024, device=device).bfloat16()
    b = torch.randn(768, 1024, device=device).bfloat16()  # [N, K], as nn.Linear stores its weight
    bias = torch.randn(768, device=device)

    y = envoi.gemm(a, b, epilogue=scale_bias_relu, alpha=0.5, bias=bias, out_dtype=torch.float32)

    expected = scale_bias_relu(a.float() @ b.float().T, alpha=0.5, bias=bias)
    difference = (y - expected).abs().max().item()
    print(f"{tuple(y.shape)} on {device}, largest difference {difference:.1e}")
    return difference


if __name__ == "__main__":
    main()
