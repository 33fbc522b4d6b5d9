"""GEMMs by expert on Hopper (sm_90) with MXFP4 weights, widened to E4M3 in registers, and FP8 tokens."""
