"""How benchmarks measure: side by side, in turn, as ratios."""
