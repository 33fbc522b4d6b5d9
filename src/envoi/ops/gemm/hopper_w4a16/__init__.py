"""GEMMs by expert on Hopper (sm_90) with 4-bit weights in an order of fragments.

`many`: for bf16 tokens, weights in the order of `envoi.quant.fragments`. `few`: the launches of a layer for few tokens,
in bf16 or FP8.
"""
