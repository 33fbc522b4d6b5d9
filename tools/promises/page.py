def write(check): return 0
