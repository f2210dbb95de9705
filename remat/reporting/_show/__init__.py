"""Shows figures: as text, as a page, and as drawings.

It reads `remat.reporting._records`, and nothing of how the figures were measured. `text`: tables
and words, sizes, times, differences of two reports; `html`: fills in `page.html`, with
a drawing; `figures`: by matplotlib, on its axes; `progress`: a bar or lines.
"""
