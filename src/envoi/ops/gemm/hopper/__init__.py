"""GEMMs on Hopper (sm_90) of bf16, fp16 and FP8: TMA, warp-specialised wgmma. Start at `kernel.py`."""
