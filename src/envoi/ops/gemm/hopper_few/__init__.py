"""GEMMs by expert of few tokens on Hopper: bf16 and FP8 weights as checkpoints store them, tokens by their ids."""
