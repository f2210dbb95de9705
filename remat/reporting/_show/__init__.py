"""Shows figures: as text, as a page, and as drawings.

It reads `remat.reporting._records`, and nothing of how the figures were measured.

- `text`: tables and words, FLOPs and times; two reports side by side.
- `html`: one page, from the template `page.html`, with a drawing.
- `figures`: drawings by matplotlib.
- `progress`: a bar, or lines.
"""
