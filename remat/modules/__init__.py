"""Regions in a model that is there already: `apply` puts them in, `remove` takes them out."""

from remat.modules._apply import apply, remove

__all__ = ["apply", "remove"]
