"""Demo: a trained MoE model answers through Envoi, on any hardware."""
