"""The limit of open files of this process; every network connection needs one."""

MAX_OPEN_FILES = 65_536


def allow_many_open_files() -> None:
    """Raise the limit to `MAX_OPEN_FILES`, or as far as the system allows. It is never lowered."""
    import resource

    limit, highest = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if highest == resource.RLIM_INFINITY else min(MAX_OPEN_FILES, highest)
    if limit != resource.RLIM_INFINITY and limit < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, highest))
