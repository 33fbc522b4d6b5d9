"""Tests of Envoi. One thread for numpy's products: set before numpy is imported, as that of torch in `conftest.py`."""

import os

os.environ["OPENBLAS_NUM_THREADS"] = "1"
