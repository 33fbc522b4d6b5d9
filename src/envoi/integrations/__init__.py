"""Adapters that run Envoi inside other libraries. Each module imports its library itself."""
