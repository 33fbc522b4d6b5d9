"""Programs that prove what Envoi promises: same bits, soak, faults, sanitizers, and the page of their runs."""
