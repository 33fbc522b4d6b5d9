"""GEMMs in plain Triton: any GPU, any format, any epilogue, and the interpreter on a CPU."""
