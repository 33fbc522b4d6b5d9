"""Operators, a package each; `envoi` has their functions, so that no package has the name of one."""
