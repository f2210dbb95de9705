"""What a function reaches beyond its arguments: found, fetched, checked at each call.

Before a trace, a `Survey` goes through what the roots reach: roots[0] is the user's
callable, the others are objects among its arguments. While the trace runs, `recording`
notes which attributes are read, by watching them. After it, `cover` bakes both into a
`Covered`, which for *any* roots of the same code fetches the captured tensors anew and
checks that the covered state is what it was; docs/limits.md says what that is, and what is
never checked. An attribute that was not read is not covered: equal layers that differ in
`layer_idx` share a trace.

- `walk`: the `Survey`: everything that is reached, and how it is put back.
- `contents`: the values at an object's places, by the sort of the object: functions,
  modules, dicts, arrays, slots.
- `places`: one step to a value, which can be read, written, refilled and named; and what is
  compared there: simple values, the bytes of arrays.
- `library`: whose code something is, the user's or a library's, and which names it
  mentions.
- `reads`: `recording`: which attributes a trace reads.
- `iterators`: where iterators stand, and which have been advanced.
- `bake_spots`: `cover`: what was reached and read becomes spots with their rules.
- `covered`: spots, rules, and the function that checks and fetches them at each call.
"""
