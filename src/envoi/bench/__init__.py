"""`envoi bench`: what is measured, how, and the files that the numbers are kept in."""
