"""Models of GPU time by which kernels choose their configs: times that they are fitted to, and the fit."""
