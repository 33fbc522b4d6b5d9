"""Programs for developers of Envoi; the wheel doesn't contain them."""
