"""``baton doctor``: is this machine fit for what the config asks of it?"""
