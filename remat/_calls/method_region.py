"""A region around a method of one module: it follows the module's class and copies."""

import gc
import sys
import types
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast, final

from torch.compiler import is_dynamo_compiling

from remat._calls.decorated import DecoratedFunction
from remat._calls.options import Settings
from remat._errors import CapturedTensorError
from remat._torch.modules import calling_module, forward_of, is_copy

_P = ParamSpec("_P")
_R = TypeVar("_R")


@final
class MethodRegion(DecoratedFunction[_P, _R]):
    """A region around a method of one module, such as its `forward`.

    `torch.compile(module)` skips torch's own frames around `forward` and begins a graph at
    the first frame below them. If a region replaces `forward`, that is the `__call__` of
    this class, which Dynamo sees; that of other regions is hidden from it.

    A copy of the module's attributes has this very region, which then runs the copy's method. Where
    the method is the class's own `forward`, the region follows the class to another one.
    """

    #: The references to this region when it was last seen that no copy of its module has it.
    _alone_at = 0

    def __init__(
        self, fun: Callable[_P, _R], settings: Settings, where: str = ""
    ) -> None:
        super().__init__(fun, settings, where)
        method: Any = fun
        self._is_forward = method.__func__ is forward_of(method.__self__)

    @property
    def __code__(self) -> types.CodeType:
        """The method's, which torch.export asks for."""
        return cast("Any", self._fun).__code__

    def follow_class(self) -> None:
        """Runs what is the `forward` of the module's class now, if it ran the one before."""
        method: Any = self._fun
        now = forward_of(method.__self__)
        if self._is_forward and method.__func__ is not now:
            self.__dict__.pop("_cache", None)
            own: Any = types.MethodType(now, method.__self__)
            cast("Any", MethodRegion).__init__(self, own, self.settings)

    def __call__(self, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        """Calls the method; its backward will recompute."""
        if not is_dynamo_compiling():
            self.follow_class()
            through, method = calling_module(), cast("Any", self._fun)
            if through is None:
                self._require_alone()
            elif is_copy(through, method.__self__):
                forward = forward_of(through) if self._is_forward else method.__func__
                method = types.MethodType(forward, through)
                return MethodRegion(method, self.settings, self._where)(*args, **kwargs)
        return super().__call__(*args, **kwargs)

    def _require_alone(self) -> None:
        """Refuses a call past torch's own if a copy of the module has this region too."""
        references = sys.getrefcount(self)
        if references == self._alone_at:
            return
        method: Any = self._fun
        own = cast("dict[str, Any]", vars(method.__self__))
        holders: list[Any] = gc.get_referrers(self)
        for each in holders:
            is_other = type(each) is dict and each is not own
            if is_other and own.keys() <= cast("dict[str, Any]", each).keys():
                raise CapturedTensorError.of(
                    where=self._where,
                    what="is called directly, and stands in a copy of its module too.",
                    why="A copy of a module's attributes shares its regions, and these cannot "
                    "tell which of the modules is meant.",
                    do="Call the module, module(x) instead of module.forward(x), or give "
                    "the copy regions of its own (modules.apply).",
                )
        self._alone_at = references
