"""Tests of Envoi, in one thread a process: set before torch and numpy are imported, and for processes that tests start.

Two processes whose thread pools wait for each other's cores crawl.
"""

import os

os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
