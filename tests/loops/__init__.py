"""Training loops as people write them, each natively and in eleven ways of ours."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "python"))
