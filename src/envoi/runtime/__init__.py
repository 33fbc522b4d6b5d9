"""What every operator shares: launches, TMA, workspaces, devices, synchronisation, custom operators, Triton."""
