"""GEMMs by expert on Hopper (sm_90) with 4-bit weights, widened in registers to E4M3, for FP8 tokens, or to bf16."""
