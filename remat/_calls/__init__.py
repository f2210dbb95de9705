"""A decorated function and its cache: from a user's call to the region that serves it.

In come a function, its `options` and a call, of which a `signature` is made; out comes the result of
the region whose `guards` hold, found by `routes` and `lookup` (`families` differ in sizes), or made
by `cache_miss` as an `entry`: from a `traced_call`, with `advice`. `residuals` are what it holds.
`torch_compile` puts regions into graphs; `decorated_in_graph` is `remat` called in one. Reads all.
"""
