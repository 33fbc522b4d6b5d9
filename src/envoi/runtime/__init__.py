"""Foundation of every operator: launches, TMA, workspaces, devices, synchronisation, custom operators, Triton."""
