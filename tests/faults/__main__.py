"""`python -m tests.faults`: all faults, also those that restart engines, and the matrix.

Arguments are pytest's.
"""

import sys
from pathlib import Path

import pytest

if __name__ == "__main__":
    sys.exit(pytest.main([str(Path(__file__).parent), "-m", "slow or faults_full", "-q", *sys.argv[1:]]))
