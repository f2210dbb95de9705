"""The one door to what torch does not promise: a file for each subject.

In come torch's private names, each with what will make it obsolete; out go functions that
say what they mean. All was checked on torch 2.13 and 2.15: what fails to import names the
version, so that an upgrade fails at import, not in the middle of training. Reads torch and
itself alone.

- `allocator`: a device's allocator: the most that a run has taken.
- `attributes`: attributes that have another value for the length of a block.
- `autocast`: its cache of casts.
- `autograd`: nodes, what they saved, `Function`s, the backward under way, detached tensors.
- `distributed`: process groups, collectives, `fully_shard`.
- `dropout`: dropout that draws the same masks under a transform.
- `dtensor`: DTensors, and results of collectives that are under way.
- `dynamo`: what torch.compile sees as it traces.
- `fakes`: tensors without data and the mode that makes them: which kernels it lacks, what
  an error says of that.
- `generator_states`: who asks for the state of a default generator, or sets it.
- `guards`: the cheap checks of tensors and of a thread's state that each call makes.
- `isolation`: code that runs outside every transform, mode and hook.
- `levels`: the levels of torch.func, the wrappers they make, steps below one, the dual
  level.
- `loops`: `torch.while_loop` and its derivative.
- `modes`: dispatch modes and modes of torch functions.
- `modules`: hooks of modules, and second places of parameters.
- `runners`: Inductor, and torch's own interpreter.
- `schemas`: what is known of an operator, and how this package's own are defined.
- `sizes`: sizes that are symbols.
- `taking_functions`: `torch.cond` and its like: which there are, run without data, their
  rules under vmap.
- `tensors`: views, memory that is shared, bits.
- `tracer`: `make_fx`, what it replaces in a traced function, and what a running trace can
  be asked.
- `trees`: pytrees.
"""
