"""Checks of the integrations with serving engines: names that they rely on, numbers in the engines' own classes."""
