"""`engine="rerun"`: a function that cannot be traced runs again in the backward.

In come the user's function and its arguments; out come its results, with a backward that
calls the function once more under the state of the first run. Reads `_regions`, under
whose rules it stands as a region without programs.
"""
