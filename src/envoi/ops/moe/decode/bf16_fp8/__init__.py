"""Decode layer on Hopper for bf16 and FP8 weights as checkpoints store them: L1 reads tokens by their ids."""
