"""The Python of a process of pytest-xdist: a fork that has imported torch and transformers already,
which runs the line that execnet gives to Python.
"""

import sys

if __name__ == "__main__":  # and not where a process of multiprocessing's begins
    exec(sys.argv[-1])
