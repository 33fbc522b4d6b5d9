"""GEMMs by expert of MXFP4 weights and bf16 tokens on Hopper, weights in the order of `envoi.quant.fragments`."""
