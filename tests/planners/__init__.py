"""Random planning problems, their brute-force optimum, and a sweep over many of them."""
