"""What Envoi promises, proven by runs: the same bits, soak, faults, sanitizers, and the page that says so."""
