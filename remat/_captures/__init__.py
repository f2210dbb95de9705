"""What a function reaches beyond its arguments: found, fetched, checked at each call.

Before a trace, a `Survey` (`walk`) goes through what the roots reach, by the `contents` of each
object at its `places`: roots[0] is the user's callable, the others are objects among its
arguments. While the trace runs, `recording` (`reads`) notes which attributes are read. After it,
`cover` (`bake_spots`) bakes both, by `spot_rules`, into a `Covered`, which for *any* roots of the
same code fetches the captured tensors anew and checks (`generated_check`) that the covered state is
what it was: closure cells, named globals (through the user's helper functions), defaults, partials,
attributes that the trace read, lists, tuples and dicts of these, the code of helpers, and which
captured tensors are one. An attribute that was not read is not covered, so equal layers that differ
in `layer_idx` share one trace. `library` says which code is the user's.

What cannot be covered, and is never checked: the contents of sets, deques, read-only mappings and
numpy arrays, what a class has from its metaclass, values that properties compute from elsewhere,
iterators, names computed at run time, attributes hung on tensors, objects that only C types hold,
library globals (torch's default dtype and the like are part of the signature instead), constants
that library classes hold in containers, a builtin's name that becomes a global later, time, files.
"""

from remat._captures.bake_spots import cover
from remat._captures.contents import code_key, hides_contents, shows_contents
from remat._captures.covered import Covered
from remat._captures.library import user_bases
from remat._captures.places import Step, look, put
from remat._captures.reads import Reads, recording
from remat._captures.walk import Survey

__all__ = [
    "Covered",
    "Reads",
    "Step",
    "Survey",
    "code_key",
    "cover",
    "hides_contents",
    "look",
    "put",
    "recording",
    "shows_contents",
    "user_bases",
]
