"""How a result shows itself: it asks `fusekit.display` for its picture when a front end asks it."""

from collections.abc import Iterable


class Shown:
    """Mixin of every result type: text in a terminal, html in a notebook.

    The bundle always holds `text/plain`, which means something by itself, and `text/html`
    without scripts. Neither ever raises.
    """

    def __repr__(self) -> str:
        from fusekit import display

        return display.text(self)

    def _repr_html_(self) -> str:
        from fusekit import display

        return display.html(self)

    def _repr_mimebundle_(
        self, include: Iterable[str] | None = None, exclude: Iterable[str] | None = None
    ) -> dict[str, str]:
        from fusekit import display

        return display.bundle(self)
