"""`envoi bench`: the cases, the measurement, and the files of results."""
