"""GEMMs on Hopper (sm_90) with MXFP4 or MXFP8 weights, which are widened to bf16 in registers. Start at `kernel.py`."""
