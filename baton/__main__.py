"""``python -m baton``: the ``baton`` command where its script is not on the PATH."""

from baton.console.main import app

app()
