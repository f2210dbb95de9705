"""Shows figures: as text, as a page, and as drawings.

It reads `remat.reporting._records`, and nothing of how the figures were measured.
"""
