"""The one exception that fusekit raises for what a user can put right."""


class FusekitError(RuntimeError):
    """Something was asked that cannot be done; the message names it and the way out."""
