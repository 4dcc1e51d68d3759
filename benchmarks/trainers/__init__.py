"""What other trainers' steps take from the weights, beside the native whole batch's gradient."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests" / "python"))  # measure.py
