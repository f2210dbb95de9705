"""Looking at what regions hold."""

from remat.reporting._looking import print_saved_residuals, saved_residuals

__all__ = ["print_saved_residuals", "saved_residuals"]
