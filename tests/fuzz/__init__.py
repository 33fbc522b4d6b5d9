"""Random cases of every operator, judged in float64 by code that shares nothing with Envoi's kernels or references.

    python -m tests.fuzz gemm --seed 0 --count 1000
    TRITON_INTERPRET=1 python -m tests.fuzz moe --seed 7 --count 20 --sizes small

A case follows from the operator, its seed and the sizes, so `--seed S --count 1` repeats it. Read in this order: draw
(what a case is), formats (numbers by their definitions), approx (what float32 may do to them), products, experts, run.
"""
