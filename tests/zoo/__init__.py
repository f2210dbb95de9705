"""The zoo: small random models of other libraries, trained with regions and without.

`python -m tests.zoo` trains each and prints the table of `docs/zoo.md`. Nothing is downloaded:
weights are random, sizes are small.
"""
