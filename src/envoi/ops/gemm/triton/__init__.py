"""GEMMs in plain Triton, for any GPU, any format and any epilogue, and for the interpreter on a CPU."""
