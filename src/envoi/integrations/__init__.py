"""Envoi inside other libraries. Each module imports its library itself."""
