"""Command `envoi tune`: measure the configs of the Hopper GEMMs on this machine and keep the fastest."""
