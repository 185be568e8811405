"""Is run by execnet in a process of tests, in place of ``xdist.remote``: gives the channel to who waits for it."""

if __name__ == "__channelexec__":
    from tests.parallel import collected

    collected.here.hand_over(channel)  # type: ignore[name-defined]  # noqa: F821
